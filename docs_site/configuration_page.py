"""Writes docs/configuration.md from the settings of each process: `make reference`, or this as a program."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from common.config import SettingDescription, described_settings
from decode_service.config import DecodeConfig
from deploy.cluster_config import ClusterConfig
from prefill_service.config import PrefillConfig
from router.config import RouterConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

Written by `make reference` from the code; a test holds it to that.

There are three processes, and one command that starts all of them:

| process | command | section of a file | settings |
|---|---|---|---|
| router: the front door | `baton serve router` | `router` | [router](#router) |
| prefill pod | `baton serve prefill` | `prefill` | [pods](#pods), [prefill](#prefill) |
| decode pod | `baton serve decode` | `decode` | [pods](#pods), [decode](#decode) |
| a whole cluster on one machine | `baton up` | `cluster`, and the others | [cluster](#cluster) |

Every setting is an option and a key in a YAML file. `max_num_seqs` is `--max-num-seqs` on the command line and
`max_num_seqs:` in the file. Options win over the file, the file wins over the default.

| type | command line | YAML |
|---|---|---|
| integer, number, text | `--port 8000` | `port: 8000` |
| on or off | `--mtls`, `--no-mtls` | `mtls: true` |
| or none | `--target-itl-ms none` | `target_itl_ms: null` |
| list | `--decode a:1,b:2`, or repeated | `decode: [a:1, b:2]` |
| mapping | `--connector-options ttl_s=60`, repeated, or JSON | `connector_options: {ttl_s: 60}` |
| size in bytes | `512MiB`, `4GB`, `1048576` | the same |

```yaml
# baton.yaml: baton up --config baton.yaml
cluster: {prefill: 1, decode: 2}
decode: {max_num_seqs: 128}
router: {request_timeout_s: 120}
```

`baton serve` takes `--config` as well, and reads its own section. Given several times, the later file wins.
A wrong value is one line that names the setting, and exit code 2. `--help` lists the settings in **bold** here,
`--help-all` lists all.

An empty default means that nothing is set; the text then says what happens.
"""

_TEXTS = {
    "router": "`baton serve router`, or the section `router` of a file.",
    "pods": "`baton serve prefill` and `baton serve decode`, or the sections `prefill` and `decode` of a file.",
    "prefill": "Prefill pods also have:",
    "decode": "Decode pods also have:",
    "cluster": (
        "`baton up`, or the section `cluster` of its file. `baton up` also takes the settings of [pods](#pods), which\n"
        "it gives to every pod, and those of the [router](#router). Settings of ranks, as `tensor_parallel_size`,\n"
        "may be those of one role: `--prefill-tensor-parallel-size`, `--decode-tensor-parallel-size`. It chooses the\n"
        "addresses and certificates of its processes itself."
    ),
}
_CONNECTORS = """\
## Options of connectors

`connector_options` depend on the connector; [kv.md](kv.md#settings) has them.

## Environment

| variable | of | what it does |
|---|---|---|
| `BATON_API_KEYS` | router | API keys, see [security.md](security.md#api-keys) |
| `BATON_URL`, `BATON_API_KEY` | `baton complete`, `chat`, `bench`, `run-batch` | address and key of the router |
| `HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` | router, pods | cache, offline mode and mirror of the model hub |
| `XDG_CACHE_HOME` | pods | where kernels and other things for the next start are kept; default `~/.cache` |
| `XDG_STATE_HOME` | `baton up -d` | where logs and state are kept; default `~/.local/state` |
| `BATON_MAX_CPU_ISA` | pods on a CPU | holds kernels to the instructions of an older [processor](processors.md) |
| `OMP_NUM_THREADS`, `OMP_WAIT_POLICY` | pods on a CPU | see [Threads on a CPU](architecture.md#threads-on-a-cpu) |
| `UCX_TLS`, `UCX_NET_DEVICES`, `UCX_LOG_LEVEL` | pods with `nixl` | see [kv.md](kv.md#nixl) |
"""


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for section, settings in _sections().items():
        parts += [f"## {section}\n", f"{_TEXTS[section]}\n", *_tables(section, settings)]
    return "\n".join([*parts, _CONNECTORS])


def _sections() -> dict[str, list[SettingDescription]]:
    """The settings of each section. What both kinds of pods have is in a section of its own."""
    prefill, decode = described_settings(PrefillConfig), described_settings(DecodeConfig)
    pods = [setting for setting in prefill if setting in decode]
    return {
        "router": described_settings(RouterConfig),
        "pods": pods,
        "prefill": [setting for setting in prefill if setting not in pods],
        "decode": [setting for setting in decode if setting not in pods],
        "cluster": [setting for setting in described_settings(ClusterConfig) if setting not in pods],
    }


def _tables(section: str, settings: list[SettingDescription]) -> list[str]:
    """One table per topic, in the order of the help."""
    topics = list(dict.fromkeys(setting.topic for setting in settings))
    by_topic = groupby(sorted(settings, key=lambda setting: topics.index(setting.topic)), lambda setting: setting.topic)
    parts = []
    for topic, rows in by_topic:
        lines = ["| setting | type | default | what it does |", "|---|---|---|---|", *map(_row, rows)]
        parts += [f"### {section}: {topic}\n", "\n".join(lines) + "\n"]
    return parts


def _row(setting: SettingDescription) -> str:
    name = f"**`{setting.name}`**" if setting.is_everyday else f"`{setting.name}`"
    default = f"`{setting.default}`" if setting.default else ""
    return f"| {name} | {_cell(setting.kind)} | {default} | {_cell(setting.text)} |"


def _cell(text: str) -> str:
    """Escapes what Markdown would take for markup."""
    for character in "\\|*[]<":
        text = text.replace(character, f"\\{character}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
