"""What `baton up` would start."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import socket
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cli.up import main
from common.config import build, field_names, parse
from common.engine.config import CacheConfig, EngineConfig, ModelConfig
from common.engine.model.checkpoint import HUB_FILES
from common.errors import ConfigError
from common.pod.config import PodConfig
from decode_service.config import DecodeConfig
from deploy.cluster_config import ClusterConfig, ModelSource, parse_cluster
from deploy.cluster_plan import (
    ClusterPlan,
    curl_line,
    operator_environment,
    plan_cluster,
    pod_environment,
    prometheus_targets,
    write_private,
)
from deploy.local_cluster import has_api_keys
from deploy.model_download import MODEL_FILES
from deploy.ports import check_free, pick_ports
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from router.security.key_source import ENVIRONMENT, load_keys
from router.serving.model_files import _FILES as ROUTER_FILES


def plan(config: ClusterConfig, config_file: Path | None = None) -> ClusterPlan:
    return plan_cluster(config, 8000, 9000, Path("/scratch"), config_file)


def option(command: tuple[str, ...], name: str) -> list[str]:
    return [after for before, after in itertools.pairwise(command) if before == name]


def test_every_pod_has_a_port_and_the_router_knows_them_all() -> None:
    planned = plan(ClusterConfig(prefill=2, decode=3))
    assert [pod.name for pod in planned.pods] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert len({pod.address for pod in planned.pods}) == 5
    router = planned.router.command
    assert option(router, "--prefill") == [pod.address for pod in planned.pods if pod.role == "prefill"]
    assert option(router, "--decode") == [pod.address for pod in planned.pods if pod.role == "decode"]
    for pod in planned.pods:
        assert option(pod.command, "serve") == [pod.role]
        assert option(pod.command, "--connector") == ["shared-storage"]
        assert option(pod.command, "--connector-path") == ["/scratch"]


def test_the_connector_has_a_directory_of_its_own_unless_one_is_given() -> None:
    planned = plan(ClusterConfig(connector_path="/mnt/kv"))
    assert [option(pod.command, "--connector-path") for pod in planned.pods] == [["/mnt/kv"]] * 2
    by_option = plan(ClusterConfig(connector_options={"path": "/mnt/kv"}))
    assert [option(pod.command, "--connector-path") for pod in by_option.pods] == [["/mnt/kv"]] * 2


@pytest.mark.parametrize("name", ["memory", "pigeon"])
def test_what_joins_no_processes_is_refused_and_not_proposed(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--connector: '{name}' cannot join .* known are .*shared-storage") as info:
        plan(ClusterConfig(connector=name))
    assert "memory" not in info.value.message.partition("known are")[2]


def pod_configs(planned: ClusterPlan, directory: Path) -> list[PodConfig]:
    """What the pods would read, from files that a launcher would have written into `directory`."""
    for file, text in planned.files.items():
        assert file.parent == directory
        file.unlink(missing_ok=True)
        write_private(file, text)
    return [parse(PodConfig, pod.command[5:], prog="", section=pod.role) for pod in planned.pods]


def test_connector_options_reach_every_pod_and_no_command_line(tmp_path: Path) -> None:
    user_file = tmp_path / "baton.yaml"
    user_file.write_text("decode: {connector_options: {threads: 7}}\n")
    options: dict[str, str | int | float | bool] = {"url": "redis://:secret@10.0.0.9", "threads": 3}
    planned = plan_cluster(
        ClusterConfig(prefill=2, connector="redis", connector_options=options), 8000, 9000, tmp_path, user_file
    )
    *prefill, decode = pod_configs(planned, tmp_path)
    assert [pod.connector_options for pod in prefill] == [options, options]
    assert decode.connector_options == {**options, "threads": 7}
    assert not planned.stores
    assert not [word for pod in (*planned.pods, planned.router) for word in pod.command if "secret" in word]
    assert {file.stat().st_mode & 0o777 for file in planned.files} == {0o600}


def test_redis_without_a_url_gets_a_server_of_its_own(tmp_path: Path) -> None:
    config = ClusterConfig(connector="redis", connector_options={"ttl_s": 60}, redis_memory=64 << 20)
    planned = plan_cluster(config, 8000, 9000, tmp_path, None)
    (redis,) = planned.stores
    assert {pod.connector_options["url"] for pod in pod_configs(planned, tmp_path)} == {redis.url}
    assert {pod.connector_options["ttl_s"] for pod in pod_configs(planned, tmp_path)} == {60}
    assert f"maxmemory {64 << 20}\n" in planned.files[redis.settings_file]
    commands = [redis.spec.command, planned.router.command, *(pod.command for pod in planned.pods)]
    assert not [word for command in commands for word in command if redis.password in word]
    assert not plan_cluster(ClusterConfig(prefill=0, connector="redis"), 8000, 9000, tmp_path, None).stores


def test_a_store_below_nixl_is_started_too(tmp_path: Path) -> None:
    pytest.importorskip("nixl")
    options: dict[str, str | int | float | bool] = {"store": "redis", "host_bytes": "1GiB"}
    planned = plan_cluster(ClusterConfig(connector="nixl", connector_options=options), 8000, 9000, tmp_path, None)
    (redis,) = planned.stores
    wanted = {**options, "store.url": redis.url}
    assert [pod.connector_options for pod in pod_configs(planned, tmp_path)] == [wanted, wanted]
    running = {**options, "store.url": "redis://10.0.0.9"}
    config = ClusterConfig(connector="nixl", connector_options=running)
    assert not plan_cluster(config, 8000, 9000, tmp_path, None).stores
    on_files = ClusterConfig(connector="nixl", connector_options={"store": "shared-storage"})
    pods = pod_configs(plan_cluster(on_files, 8000, 9000, tmp_path, None), tmp_path)
    assert {pod.connector_options["store.path"] for pod in pods} == {str(tmp_path)}


def test_the_router_has_as_many_workers_as_the_cluster_says() -> None:
    assert parse(RouterConfig, plan(ClusterConfig()).router.command[5:], prog="", section="router").workers == 1
    several = plan(ClusterConfig(router_workers=3)).router
    assert parse(RouterConfig, several.command[5:], prog="", section="router").workers == 3


def test_colocated_pods_need_no_connector() -> None:
    planned = plan(ClusterConfig(prefill=0, decode=1))
    assert [pod.role for pod in planned.pods] == ["decode"]
    assert option(planned.pods[0].command, "--connector") == ["none"]
    assert "--prefill" not in planned.router.command


@pytest.mark.parametrize("tier", [{"host_bytes": "1GiB"}, {"offload": True}])
def test_colocated_pods_may_have_tiers(tier: dict[str, str | int | float | bool], tmp_path: Path) -> None:
    config = ClusterConfig(prefill=0, decode=2, connector="redis", connector_options=tier)
    planned = plan_cluster(config, 8000, 9000, tmp_path, None)
    wanted = {**tier, "url": planned.stores[0].url}
    assert [(pod.connector, pod.connector_options) for pod in pod_configs(planned, tmp_path)] == [("redis", wanted)] * 2


def test_engine_settings_reach_every_pod_and_the_model_the_router() -> None:
    engine = EngineConfig(model=ModelConfig(model="some/model"), cache=CacheConfig(block_size=8))
    planned = plan(ClusterConfig(engine=engine), Path("/etc/baton.yaml"))
    for pod in planned.pods:
        assert {"--model=some/model", "--block-size=8"} <= set(pod.command)
        assert option(pod.command, "--config") == ["/etc/baton.yaml"]
    assert option(planned.router.command, "--model") == ["some/model"]
    assert "--block-size=8" not in planned.router.command


def test_each_of_several_models_has_pods_and_the_router_knows_all() -> None:
    models = {"qwen": "Qwen/Qwen3-0.6B", "llama": "/models/llama", "gpt-4": "Qwen/Qwen3-0.6B"}
    command = parse_cluster([f"--models={name}={location}" for name, location in models.items()] + ["--decode", "2"])
    planned = plan(command.config)
    configs = [parse(PodConfig, pod.command[5:], prog="", section=pod.role) for pod in planned.pods]
    locations = [option(pod.command, "--model")[0] for pod in planned.pods]
    assert [(pod.pod_id, pod.model_name, at) for pod, at in zip(configs, locations, strict=True)] == [
        ("prefill-0", "qwen", "Qwen/Qwen3-0.6B"),
        ("prefill-1", "llama", "/models/llama"),
        ("decode-0", "qwen", "Qwen/Qwen3-0.6B"),
        ("decode-1", "qwen", "Qwen/Qwen3-0.6B"),
        ("decode-2", "llama", "/models/llama"),
        ("decode-3", "llama", "/models/llama"),
    ]
    assert [pod.model for pod in planned.pods] == ["qwen", "llama", "qwen", "qwen", "llama", "llama"]
    router = parse(RouterConfig, planned.router.command[5:], prog="router", section="router")
    assert (router.serving.served_models.models, len(router.prefill), len(router.decode)) == (models, 2, 4)
    assert [source.model for source in command.model_sources] == ["Qwen/Qwen3-0.6B", "/models/llama"]


def test_the_processes_understand_their_options() -> None:
    config = ClusterConfig(
        prefill=2,
        decode=2,
        served_model_name="name",
        generation_config="none",
        override_generation_config={"top_p": 0.5, "top_k": 3},
        engine=EngineConfig(model=ModelConfig(revision="main")),
    )
    planned = plan(config)
    for pod in planned.pods:
        options = parse(PodConfig, pod.command[5:], prog="pod", section=pod.role)
        assert (options.pod_id, options.connector, options.model_name) == (pod.name, "shared-storage", "name")
        assert f"{options.host}:{options.port}" == pod.address
    assert parse(PodConfig, plan(ClusterConfig(prefill=0)).pods[0].command[5:], prog="", section="").connector is None
    router = parse(RouterConfig, planned.router.command[5:], prog="router", section="router")
    served = router.serving.served_models
    assert (len(router.prefill), len(router.decode), served.served_model_name) == (2, 2, ["name"])
    assert served.revision == "main"
    assert (served.generation_config, served.override_generation_config) == ("none", {"top_p": 0.5, "top_k": 3})


def test_cores_are_shared_out_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert pod_environment({}, 2)["OMP_NUM_THREADS"] == "4"
    assert pod_environment({}, 16)["OMP_NUM_THREADS"] == "1"
    assert pod_environment({"OMP_NUM_THREADS": "3"}, 2)["OMP_NUM_THREADS"] == "3"


def test_a_cluster_that_only_pools_hands_nothing_over_and_is_asked_for_an_embedding() -> None:
    planned = plan(ClusterConfig(prefill=2, decode=0))
    assert [option(pod.command, "--connector") for pod in planned.pods] == [["none"]] * 2
    words = shlex.split(curl_line("http://127.0.0.1:8000", "baton-demo", generates=False))
    assert "http://127.0.0.1:8000/v1/embeddings" in words
    assert set(json.loads(words[-1])) == {"model", "input"}


def test_the_curl_line_is_shell_and_json() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "baton-demo"))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == "baton-demo"


def test_the_curl_line_has_a_place_for_the_key_where_one_is_needed() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", None))
    assert words[words.index("-H") + 1] == "Authorization: Bearer $BATON_API_KEY"
    assert "model" not in json.loads(words[-1])


def test_picked_ports_differ_and_taken_ones_are_refused() -> None:
    ports = pick_ports("127.0.0.1", 5)
    assert len(set(ports)) == 5
    with socket.create_server(("127.0.0.1", ports[0])):
        with pytest.raises(ConfigError, match=f"--port: cannot listen on 127.0.0.1:{ports[0]}: Address already in use"):
            check_free("127.0.0.1", ports[0], "--port")
        with pytest.raises(ConfigError, match="--port: cannot listen"):
            main(["--port", str(ports[0])])


@pytest.mark.skipif(sys.platform != "linux", reason="a bound port can be listened on by another socket")
def test_no_other_launcher_picks_a_port_that_waits_for_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers that did would have one's pod answer for the other's."""
    first = pick_ports("127.0.0.1", 1)
    candidates = [*first, *pick_ports("127.0.0.1", 1)]
    monkeypatch.setattr("deploy.ports.random.sample", lambda population, k: candidates)
    with pytest.raises(ConfigError, match="--host: 1 free ports are not to be had"):
        pick_ports("127.0.0.1", 1)
    with socket.create_server(("127.0.0.1", first[0])):  # while its own pod can listen, and listen again
        pass
    with socket.create_server(("127.0.0.1", first[0])):
        pass


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--decode", "-1"], "--decode: must be >= 0, got -1"),
        (["--prefill", "0", "--decode", "0"], "--decode: 0, and --prefill 0 as well: there would be no pod"),
        (["--prefill", "65"], "--prefill: must be <= 64, got 65"),
        (["--port", "7", "--grpc-port", "7"], "--grpc-port: must differ from --port"),
        (["--block-size", "0"], "--block-size: must be >= 1, got 0"),
        (["--host", "no.such.host.invalid"], "--host: "),
    ],
)
def test_bad_settings_start_nothing(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_config_file_sections_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("clutser: {prefill: 2}\n")
    with pytest.raises(ConfigError, match=r"clutser: unknown setting; did you mean cluster\?"):
        main(["--config", str(file)])


@pytest.mark.parametrize(
    ("section", "advice"),
    [
        ("decode: {connector_path: /mnt/kv}", r"decode\.connector_path: .* use cluster\.connector_path"),
        ("prefill: {port: 7001}", r"prefill\.port: .* leave it out"),
        ("router: {shutdown_grace_s: 5}", r"router\.shutdown_grace_s: .* use cluster\.stop_grace_s"),
    ],
)
def test_what_up_would_overrule_is_refused(tmp_path: Path, section: str, advice: str) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(section)
    with pytest.raises(ConfigError, match=advice):
        main(["--config", str(file)])


def test_yaml_and_options_meet() -> None:
    built = build(ClusterConfig, None, {"prefill": 2, "block_size": 4, "model": "m"})
    assert built.prefill == 2
    assert built.engine.cache.block_size == 4
    assert built.engine.model.model == "m"


LISTED_KEY = "team:sha256:" + "0" * 64


@pytest.mark.parametrize("listed", [{}, {ENVIRONMENT: LISTED_KEY}])
def test_the_probe_of_a_router_with_api_keys_has_one(listed: dict[str, str]) -> None:
    keys = load_keys("", operator_environment(listed, "the-key"))
    assert keys is not None
    assert len(keys) == 1 + len(listed)
    found = keys.find("the-key")
    assert found is not None
    assert found.is_operator


def test_api_keys_come_from_a_file_an_option_or_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text("router: {api_keys_file: keys.yaml}")
    assert not has_api_keys(parse_cluster([]), {})
    assert has_api_keys(parse_cluster([]), {ENVIRONMENT: LISTED_KEY})
    assert has_api_keys(parse_cluster(["--config", str(config)]), {})
    assert has_api_keys(parse_cluster(["--api-keys-file", "keys.yaml"]), {})


def test_options_of_processes_reach_those_that_have_them(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text("router: {remote_prefill: never, max_queued: 7}\n")
    options = "--remote-prefill prefer --handoff-queue-timeout-s=9 --transfer-lease-s 8 --registry-namespace mine"
    command = parse_cluster(["org/model", "--config", str(config), *options.split(), "--kv-failure-policy", "fail"])
    planned = plan_cluster(command.config, 8000, 9000, tmp_path, command.config_file, command.passed)
    prefill, decode = (pod.command[5:] for pod in planned.pods)
    router = parse(RouterConfig, planned.router.command[5:], prog="", section="router")
    serving = router.serving
    assert (serving.served_models.model, serving.routing.remote_prefill) == ("org/model", "prefer")
    assert serving.admission.max_queued == 7
    assert (serving.kv_failure_policy, router.discovery.registry_namespace) == ("fail", "mine")
    sent = parse(PrefillConfig, prefill, prog="", section="prefill")
    assert (sent.transfer_lease_s, sent.announcing.registry_namespace) == (8, "mine")
    received = parse(DecodeConfig, decode, prog="", section="decode")
    assert (received.handoff_queue_timeout_s, received.kv_failure_policy) == (9, "fail")


def planned_of(tmp_path: Path, options: str, file: str = "") -> ClusterPlan:
    config = tmp_path / "baton.yaml"
    config.write_text(file)
    command = parse_cluster(["--config", str(config), *options.split()])
    passed, parallel = command.passed, command.parallel
    return plan_cluster(command.config, 8000, 9000, tmp_path, config, passed, {}, parallel)


@pytest.mark.parametrize(
    ("options", "file", "num_ranks", "num_threads"),
    [
        ("", "", (1, 1), 4),
        ("--tensor-parallel-size 2", "", (2, 2), 2),
        ("--prefill-tensor-parallel-size 3", "", (3, 1), 2),
        ("--tensor-parallel-size 2 --decode-tensor-parallel-size 1", "", (2, 1), 2),
        ("", "decode: {tensor_parallel_size: 7}", (1, 7), 1),
        ("--decode-tensor-parallel-size 1", "decode: {tensor_parallel_size: 7}", (1, 1), 4),
        ("", "cluster: {tensor_parallel_size: 3}\ndecode: {tensor_parallel_size: 7}", (3, 3), 1),
    ],
)
def test_ranks_of_all_pods_or_of_those_of_a_role(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    file: str,
    num_ranks: tuple[int, int],
    num_threads: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    planned = planned_of(tmp_path, options, file)
    assert tuple(pod.parallel.num_ranks for pod in pod_configs(planned, tmp_path)) == num_ranks
    assert {pod.env["OMP_NUM_THREADS"] for pod in planned.pods} == {str(num_threads)}


def test_devices_of_a_roles_ranks_replace_those_of_all(tmp_path: Path) -> None:
    planned = planned_of(tmp_path, "--tensor-parallel-size 2 --rank-devices 0,1 --decode-rank-devices 2,3")
    assert [pod.parallel.rank_devices for pod in pod_configs(planned, tmp_path)] == [[0, 1], [2, 3]]


def test_every_setting_is_an_option_of_up_or_told_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_cluster(["--help-all"])
    described = set(re.findall(r"^  (?:-d, )?(--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    for settings in (ClusterConfig, RouterConfig, PrefillConfig, DecodeConfig):
        for name in field_names(settings):
            option = f"--{name.replace('_', '-')}"
            if option not in described:
                with pytest.raises(ConfigError, match=f"{option}: `baton up` decides this for every process; "):
                    parse_cluster([f"{option}=1"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--remote-prefill", "sometimes"], "--remote-prefill: must be one of always, auto, never, prefer, got"),
        (
            ["--drain-timeout-s", "3"],
            "--drain-timeout-s: `baton up` decides this for every process; use --stop-grace-s",
        ),
        (["--gpu-memory-utilization", "0.9"], "--gpu-memory-utilization: unknown option; --memory-fraction is "),
        (["a/b", "--model", "a/c"], "--model: a/c is not the model named first, a/b"),
        (["--name", "x"], "--name: needs --detach"),
        (["-d", "--name", "../x"], "--name: expected up to 63 letters"),
        (["a/b", "--models", "x=c/d"], "--models and --model exclude each other"),
        (["--served-model-name", "y", "--models", "x=c/d"], "--models and --served-model-name exclude each other"),
        (["--models", "x" * 300 + "=c/d"], "--models: names must have 1 to "),
        (
            ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "x"],
            "--nnodes: `baton up` is for one machine; run `baton serve` on each",
        ),
        (["--decode-tensor-parallel-size", "0"], "--decode-tensor-parallel-size: must be >= 1, got 0"),
        (
            ["--decode-rank-devices", "0,1"],
            "--decode-rank-devices: 2 devices, but --decode-tensor-parallel-size is 1",
        ),
        (
            ["--tensor-parallel-size", "2", "--rank-devices", "0,1", "--prefill-tensor-parallel-size", "4"],
            "cluster.rank_devices: 2 devices, but --prefill-tensor-parallel-size is 4",
        ),
        (["--metrics-port", "65535"], "--metrics-port: 2 pods need a port each from 65535 on"),
    ],
)
def test_wrong_options_of_up(argv: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(parse_cluster(argv).config)
    assert caught.value.message.startswith(message)


def test_a_setting_in_the_wrong_section_is_told_where_it_belongs(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("cluster: {remote_prefill: prefer}\n")
    with pytest.raises(ConfigError, match=r"cluster\.remote_prefill: belongs into the section router"):
        parse_cluster(["--config", str(file)])


def test_pods_have_metrics_ports_in_a_row() -> None:
    first, *_ = pick_ports("127.0.0.1", 1)
    planned = plan(ClusterConfig(prefill=1, decode=1))
    assert len({*planned.metrics_ports.values()}) == 2
    assert plan(ClusterConfig(metrics_port=None)).metrics_ports == {}
    with socket.create_server(("127.0.0.1", first)), pytest.raises(ConfigError, match="--metrics-port: cannot listen"):
        plan(ClusterConfig(metrics_port=first - 1))


def test_prometheus_is_told_of_every_process_that_has_metrics() -> None:
    planned = plan(ClusterConfig(prefill=1, decode=2, metrics_port=0))
    ports = planned.metrics_ports
    assert json.loads(prometheus_targets(planned, "127.0.0.1:8000")) == [
        {"targets": ["127.0.0.1:8000"], "labels": {"job": "baton-router"}},
        {"targets": [f"127.0.0.1:{ports['prefill-0']}"], "labels": {"job": "baton-prefill"}},
        {
            "targets": [f"127.0.0.1:{ports['decode-0']}", f"127.0.0.1:{ports['decode-1']}"],
            "labels": {"job": "baton-decode"},
        },
    ]
    bare = plan(ClusterConfig(metrics_port=None))
    assert [group["labels"]["job"] for group in json.loads(prometheus_targets(bare, "[::1]:1"))] == ["baton-router"]


def test_a_model_is_fetched_once_however_many_processes_load_it(tmp_path: Path) -> None:
    assert parse_cluster([]).model_sources == []
    assert parse_cluster(["a/b", "--revision", "v1"]).model_sources == [ModelSource("a/b", "v1")]
    file = tmp_path / "baton.yaml"
    file.write_text("prefill: {model: a/b}\ndecode: {model: a/b}\nrouter: {model: a/b-tokenizer, revision: 7}\n")
    assert parse_cluster(["--config", str(file)]).model_sources == [
        ModelSource("a/b-tokenizer", "7"),
        ModelSource("a/b", None),
    ]
    assert parse_cluster(["c/d", "--config", str(file)]).model_sources[-1] == ModelSource("c/d", None)


def test_models_that_propose_drafts_are_fetched_too(tmp_path: Path) -> None:
    """Once fetched, processes ask the hub nothing."""
    draft = ModelSource("a/small", "v2", "--speculative: draft:model")
    given = ["a/b", "--speculative", "draft:model=a/small,revision=v2"]
    assert parse_cluster(given).model_sources == [ModelSource("a/b", None), draft]
    assert parse_cluster(["a/b", "--speculative", "ngram"]).model_sources == [ModelSource("a/b", None)]
    file = tmp_path / "baton.yaml"
    file.write_text("decode: {speculative: 'eagle3:model=a/head'}\n")
    for text in ("none", "null", "ngram"):
        (tmp_path / "other.yaml").write_text(f"decode: {{speculative: {text}}}\n")
        assert parse_cluster(["--config", str(tmp_path / "other.yaml")]).model_sources == []
    (tmp_path / "other.yaml").write_text("decode: {speculative: medusa}\n")
    with pytest.raises(ConfigError, match=r"other\.yaml: decode\.speculative: 'medusa' is none of"):
        parse_cluster(["--config", str(tmp_path / "other.yaml")])
    head = ModelSource("a/head", None, "--speculative: eagle3:model")
    assert parse_cluster(["--config", str(file)]).model_sources == [head]
    with pytest.raises(ConfigError, match=f"^--speculative: draft:model: {tmp_path}/none does not exist$"):
        main(["--dry-run", "--speculative", f"draft:model={tmp_path}/none"])


def test_an_unknown_quantization_is_an_error_before_anything_starts() -> None:
    assert parse_cluster(["--quantization", "a.package:Linear"]).config.engine.model.quantization == "a.package:Linear"
    with pytest.raises(ConfigError, match=r"--quantization: 'int7' is none of int8, int8-dynamic, and not a module"):
        parse_cluster(["--quantization", "int7"])


def test_all_pods_get_the_adapters_which_are_fetched_once(tmp_path: Path) -> None:
    given = ["--lora-modules", "polite=/models/polite", "--lora-modules", "terse=a/terse"]
    command = parse_cluster(["a/b", *given])
    polite = ModelSource("/models/polite", None, "--lora-modules: polite", is_adapter=True)
    terse = ModelSource("a/terse", None, "--lora-modules: terse", is_adapter=True)
    assert command.model_sources == [ModelSource("a/b", None), polite, terse]
    planned = plan(command.config)
    for pod in planned.pods:
        assert list(pod.command).count("--lora-modules") == 2
        assert "terse=a/terse" in pod.command
    assert "--lora-modules" not in planned.router.command
    with pytest.raises(ConfigError, match=r"--lora-modules and --models exclude each other"):
        parse_cluster(["--models", "one=/one", *given])
    file = tmp_path / "baton.yaml"
    file.write_text("decode: {lora_modules: {polite: /models/polite}}\n")
    with pytest.raises(ConfigError, match=r"decode\.lora_modules: .* use cluster\.lora_modules"):
        parse_cluster(["--config", str(file)])
    with pytest.raises(ConfigError, match=f"^--lora-modules: polite: {tmp_path}/none does not exist$"):
        main(["--dry-run", "--lora-modules", f"polite={tmp_path}/none"])


def test_the_hub_is_asked_for_the_files_that_processes_load() -> None:
    assert set(HUB_FILES) == set(MODEL_FILES)
    assert all(any(fnmatch(name, pattern) for pattern in MODEL_FILES) for name in ROUTER_FILES)


def test_a_dry_run_prints_what_would_be_started_without_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--connector", "redis", "--connector-options", "url=redis://:geheim@10.0.0.5:6379/0", "--port", "0"]
    assert main(["--dry-run", "--prefill", "2", "--grpc-port", "0", "--max-num-seqs", "7", *options]) == 0
    printed = capsys.readouterr().out
    assert "geheim" not in printed
    assert "redis://***@10.0.0.5:6379/0" in printed
    assert "  max_num_seqs: 7\n" in printed
    names = re.findall(r"^# (\S+)\n\S+=", printed, re.MULTILINE)
    assert names == ["prefill-0", "prefill-1", "decode-0", "router"]
    (router,) = [line for line in printed.splitlines() if "serve router" in line]
    words = shlex.split(router)
    assert len(option(tuple(words), "--prefill")) == 2


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_model_that_does_not_exist_is_the_same_error_in_a_dry_run(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in ([f"{tmp_path}/none"], ["--models", f"a={tmp_path}", "--models", f"b={tmp_path}/none"]):
        with pytest.raises(ConfigError, match=f"^--model: {tmp_path}/none does not exist$"):
            main([*argv, *more])
    assert capsys.readouterr().out == ""
