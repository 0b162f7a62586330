"""Mutation check: changes one expression of the code at a time and runs the unit tests that cover it.

    python -m tests.mutants decode_service/handoff.py --sample 100

Drives mutmut, which makes the mutants and forks a test process for each. Per module:

1. A copy of the checkout is made under `build/mutants`, with a configuration that names the module's own tests.
2. mypy rejects the mutants that `make lint` would reject, the tests judge the others. A mutant under which they fail,
   or do not end in time, is killed.
3. Survivors are printed, unless `tests/mutants_accepted.toml` lists them as equivalent.

mutmut leaves decorated functions alone; only properties are seen to, see `_PROPERTY`. Composition roots (`__main__.py`)
are left out: only tests in processes of their own run them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from mutmut.configuration import reset_config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import MutatedFile, mutate_file_contents
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name, orig_function_and_class_names_from_key

ROOT = Path(__file__).parent.parent
WORKSPACES = ROOT / "build" / "mutants"
ACCEPTED = ROOT / "tests" / "mutants_accepted.toml"

SCHEDULER = "tests/unit/common/engine/scheduler"
DECODE = "tests/unit/decode_service"
PREFILL = "tests/unit/prefill_service"
ROUTER = "tests/unit/router"
KV = "tests/unit/kv_store"
CONTRACT = "tests/contract"

# What pytest selects for each module; the first pattern that matches counts.
TESTS = {
    "common/engine/scheduler/*": [SCHEDULER],
    "decode_service/*": [DECODE],
    "prefill_service/*": [PREFILL, f"{DECODE}/test_leases.py"],
    "router/dispatching/*": [
        f"{ROUTER}/dispatching",
        f"{ROUTER}/gateway/test_resume_http.py",
        f"{ROUTER}/pods/test_ejection.py",
        "tests/fuzz/test_lying_pods.py",
    ],
    "kv_store/inspection/*": ["tests/unit/cli/test_kv.py"],
    "kv_store/nixl/*": [
        *(f"{KV}/test_nixl_{name}.py" for name in ("digests", "jobs", "sender")),
        f"{KV}/test_registry.py",
        f"{CONTRACT}/test_direct_connector_contract.py",
    ],
    "kv_store/redis_exchange.py": [f"{KV}/test_redis_exchange.py"],
    "kv_store/redis_store.py": [f"{KV}/test_redis_store.py"],
    "kv_store/shared_storage.py": [f"{KV}/test_shared_storage.py"],
    "kv_store/*tier*": [f"{KV}/test_tiered_store.py", f"{KV}/test_host_pool.py", f"{CONTRACT}/test_tiers.py"],
    "kv_store/base.py": [f"{KV}/test_registry.py", f"{CONTRACT}/test_tiers.py"],
    "kv_store/registry.py": [f"{KV}/test_registry.py", f"{CONTRACT}/test_tiers.py"],
    "kv_store/store_connector.py": [
        f"{KV}/test_store_connector.py",
        *(f"{CONTRACT}/test_{name}.py" for name in ("connector_contract", "tiers", "store_outages")),
        *("-k", "not redis and not shared"),
    ],
    "kv_store/*": [
        *(f"{KV}/test_{name}.py" for name in ("block_format", "guard", "host_pool", "memory_store", "staging")),
        f"{CONTRACT}/test_connector_contract.py",
        *("-k", "not redis and not shared"),
    ],
}
# State machines, fuzzing and sweeps take most of the time, and some kill at random: a survivor lacks a test that states
# the rule.
LONG_TESTS = [
    f"{SCHEDULER}/test_direct_handoff_machine.py",
    f"{SCHEDULER}/test_direct_tiers_machine.py",
    f"{SCHEDULER}/test_scheduler_properties.py",
    f"{SCHEDULER}/test_tiers_machine.py",
    f"{DECODE}/test_handoff_machine.py",
    "tests/fuzz/test_lying_pods.py::test_answers_are_true_whatever_pods_say",
    f"{ROUTER}/gateway/test_resume_http.py::test_the_answer_goes_on_after_any_event",
]
PACKAGES = ["cli", "common", "decode_service", "deploy", "kv_store", "loadgen", "prefill_service", "router"]
NOISE = [
    r"\blogger\.",
    r"\w+Error\(",
    r'\bname=f?"',
]  # log messages, texts of errors, names of tasks and threads
TEST_TIMEOUT_S = 30

_PROGRESS = re.compile("[\u2800-\u28ff] ")  # one line for each turn of mutmut's spinner

# What a property computes is moved to a method, which has no decorator. Not that of a protocol, which is only declared:
# the method would be a member that its implementations lack.
_PROPERTY = re.compile(r'    @property\n    def (\w+)\(self\) -> (.+):\n(?!        """[^"]*"""\n(?! {8}))')
_MOVED = """\
    @property
    def \\1(self) -> \\2:
        return self.property_\\1()

    def property_\\1(self) -> \\2:
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="paths or patterns, such as 'kv_store/*.py'; default: all")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="at most N mutants per module; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants tested at once")
    parser.add_argument("--survivors", action="store_true", help="test only what survived the last run")
    args = parser.parse_args()
    groups = _groups(args.modules or ["*"])
    if not groups:
        parser.error(f"no module with tests matches {' '.join(args.modules)}")
    survivors = []
    for pattern, modules in groups.items():
        workspace = WORKSPACES / re.sub(r"\W", "_", pattern)
        survived = _of_status(_results(workspace, modules), "survived", "no tests")
        _make_workspace(workspace, modules, TESTS[pattern])
        os.chdir(workspace)
        reset_config()
        names = survived if args.survivors else _sample(modules, args.sample, args.seed)
        if names:
            print(f"{len(names)} mutants of {' '.join(modules)}", flush=True)
            _run_mutmut(names, args.jobs)
            survivors += _report(_results(workspace, modules))
    sys.exit(1 if survivors else 0)


def _groups(patterns: Iterable[str]) -> dict[str, list[str]]:
    """Modules that match, by the pattern in TESTS that they are tested under."""
    groups: dict[str, list[str]] = {}
    for path in _tracked("*.py", ":!*/__main__.py"):
        covered = next((covered for covered in TESTS if fnmatch.fnmatch(path, covered)), None)
        if covered is not None and any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
            groups.setdefault(covered, []).append(path)
    return groups


def _tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def _make_workspace(workspace: Path, modules: list[str], tests: list[str]) -> None:
    shutil.rmtree(workspace, ignore_errors=True)
    for path in _tracked():
        target = workspace / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    for module in modules:
        (workspace / module).write_text(_PROPERTY.sub(_MOVED, (workspace / module).read_text()))
    settings = {
        "source_paths": PACKAGES,
        "only_mutate": modules,
        "also_copy": ["benchmarks", "docs", "proto", "README.md", "constraints.txt"],
        "do_not_mutate_patterns": NOISE,
        "pytest_add_cli_args_test_selection": tests + [f"--deselect={path}" for path in LONG_TESTS],
        "pytest_add_cli_args": [f"--timeout={TEST_TIMEOUT_S}", "-p", "no:cacheprovider", "-p", "tests.mutants"],
        "timeout_multiplier": 4.0,
        "timeout_constant": 10.0,
        "process_isolation": "forkserver",  # gRPC and torch do not survive a fork
        "use_git_change_detection": False,
        # An attribute that `__init__` declares is declared in each of its mutants.
        "type_check_command": ["mypy", f"--cache-dir={WORKSPACES / '.mypy_cache'}", "--output=json",
                               "--disable-error-code=unused-ignore", "--disable-error-code=no-redef",
                               "-p", modules[0].split("/")[0]],
    }  # fmt: skip
    with (workspace / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n")
        file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _sample(modules: list[str], size: int, seed: int) -> list[str]:
    """Names of mutants, at most `size` of each module."""
    chosen: list[str] = []
    for module in modules:
        mutated = mutate_file_contents(module, Path(module).read_text())
        names = [
            get_mutant_name(Path(module), name) for name in mutated.mutant_names if not _is_case_change(mutated, name)
        ]
        chosen += random.Random(f"{seed} {module}").sample(names, size) if 0 < size < len(names) else names
    return chosen


def _is_case_change(mutated: MutatedFile, name: str) -> bool:
    """Whether the mutant only has a string in upper or lower case: another mutant changes the same string."""
    original = name.rpartition("__mutmut_")[0] + "__mutmut_orig"
    lines = mutated.code.splitlines()
    before, after = (
        "\n".join(lines[span.start - 1 : span.end]).replace(function, "").lower()
        for function, span in (
            (function, mutated.line_span_by_function_name[function]) for function in (original, name)
        )
    )
    return before == after


def _run_mutmut(names: list[str], jobs: int) -> None:
    binaries = Path(sys.executable).parent
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    command = [str(binaries / "mutmut"), "run", f"--max-children={jobs}", *names]
    done = subprocess.run(command, env=os.environ | {"PATH": path}, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        printed = "\n".join(line for line in done.stdout.splitlines() if not _PROGRESS.match(line))
        sys.exit(f"mutmut failed:\n{printed[-8000:]}\n{done.stderr[-4000:]}")


def _results(workspace: Path, modules: list[str]) -> dict[str, dict[str, str]]:
    """The status of each tested mutant by name, by module."""
    results = {}
    for module in modules:
        meta = workspace / "mutants" / f"{module}.meta"
        codes = json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}
        results[module] = {name: status_by_exit_code[code] for name, code in codes.items() if code is not None}
    return results


def _of_status(results: dict[str, dict[str, str]], *statuses: str) -> list[str]:
    return [name for tested in results.values() for name, status in tested.items() if status in statuses]


def _report(results: dict[str, dict[str, str]]) -> list[str]:
    """Prints a summary of each module, and returns the survivors that are not accepted."""
    accepted = tomllib.loads(ACCEPTED.read_text())
    survivors = []
    for module, tested in results.items():
        counts = ", ".join(f"{count} {status}" for status, count in sorted(Counter(tested.values()).items()))
        print(f"{module}: {counts or 'nothing to mutate'}")
        changes = [_change(module, name) for name in _of_status({module: tested}, "survived", "no tests")]
        lasting = [change for change in changes if not _is_equivalent(change, module, accepted)]
        print("".join(f"    {change}\n" for change in lasting), end="")
        survivors += lasting
    sys.stdout.flush()
    return survivors


def _is_equivalent(change: str, module: str, accepted: dict[str, dict[str, str]]) -> bool:
    """Whether the change, or a pattern that it matches, is listed."""
    patterns = accepted["every module"]
    return change in accepted.get(module, {}) or any(re.fullmatch(pattern, change) for pattern in patterns)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quickest tests first: pytest stops at the first that fails."""
    durations = state().duration_by_test
    items.sort(key=lambda item: durations.get(item.nodeid, 0.0))


def _change(module: str, name: str) -> str:
    """What a mutant is: the function, and its lines before and after."""
    function, class_name = orig_function_and_class_names_from_key(name)
    diff = get_diff_for_mutant(name, path=module).splitlines()[3:]
    before, after = (" ".join(line[1:].strip() for line in diff if line.startswith(sign)) for sign in ("-", "+"))
    owner = f"{class_name}.{function.removeprefix('property_')}" if class_name else function
    return f"{owner}: {before} -> {after}"


if __name__ == "__main__":
    main()
