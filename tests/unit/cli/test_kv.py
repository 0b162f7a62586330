"""`baton kv` on real stores, filled as pods fill them."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from cli.main import main
from common.types import BlockHash, group_key
from deploy.cluster_state import ClusterState, StoreState, claim
from kv_store.base import BlockStore
from kv_store.block_format import HEADER_BYTES, BlockFormat, BlockLayout
from kv_store.redis_store import RedisOptions, RedisStore
from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore
from tests.redis_server import RedisServer, running_redis
from tests.tls_front import create_authority, tls_front

LAYOUT = BlockLayout("bfloat16", num_layers=2, num_kv_heads=1, block_size=16, head_dim=8)
MODEL = BlockFormat(bytes(range(32)), LAYOUT, bytes(16))
OTHER_MODEL = BlockFormat(bytes(range(1, 33)), replace(LAYOUT, num_planes=1), bytes(16))


def key(index: int) -> BlockHash:
    return group_key(BlockHash(index.to_bytes(16, "big")), index % 2)


def frame(index: int, model: BlockFormat = MODEL) -> bytes:
    sealed = memoryview(bytearray([index] * model.frame_bytes))
    model.seal(sealed, key(index), num_tokens=16)
    return bytes(sealed)


class Directory:
    """A shared-storage store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arguments = ["--connector-path", str(path)]
        self.below = f"shared-storage, store.path: '{path}'"

    def open(self) -> BlockStore:
        return SharedStorageStore(SharedStorageOptions(path=str(self.path)))

    def replace(self, index: int, content: bytes) -> None:
        (file,) = self.path.glob(f"{MODEL.namespace}/*/{key(index).hex()}.kv")
        file.write_bytes(content)

    def add_foreign(self) -> set[str]:
        """Names of what only its owner may access."""
        blocks = self.path / MODEL.namespace
        for name in ("00/notes.txt", "00/0123.kv", "ff/" + "0" * 32 + ".kv", "notes/" + "0" * 32 + ".kv"):
            (blocks / name).parent.mkdir(parents=True, exist_ok=True)
            (blocks / name).write_text("mine")
        (self.path / "model" / "00").mkdir(parents=True)
        (self.path / "model" / "00" / ("0" * 32 + ".kv")).write_text("mine")
        (blocks / "00" / ("0" * 31 + "a.kv")).symlink_to("notes.txt")
        return self.names()

    def names(self) -> set[str]:
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if not path.is_dir()}


class Redis:
    """A redis store."""

    def __init__(self, server: RedisServer) -> None:
        self.url = server.url
        self.arguments = ["--connector", "redis", "--connector-options", f"url={server.url}"]
        self.below = f"redis, store.url: '{server.url}'"

    def open(self) -> BlockStore:
        return RedisStore(RedisOptions(url=self.url))

    def replace(self, index: int, content: bytes) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.set(f"baton:{MODEL.namespace}:{key(index).hex()}", content, keepttl=True)

    def add_foreign(self) -> set[str]:
        block = f"{MODEL.namespace}:{'0' * 32}"
        with redis.Redis.from_url(self.url) as client:
            for name in (f"app:{block}", f"app:baton:{block}", f"baton:{block}0", f"baton:model:{'0' * 32}", "baton:x"):
                client.set(name, "mine")
        return self.names()

    def names(self) -> set[str]:
        with redis.Redis.from_url(self.url) as client:
            return set(map(bytes.decode, client.scan_iter()))


Medium = Directory | Redis


@pytest.fixture(params=["shared-storage", "redis"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    if request.param == "shared-storage":
        (tmp_path / "kv").mkdir()
        yield Directory(tmp_path / "kv")
    else:
        with running_redis() as server:
            yield Redis(server)


def fill(medium: Medium, *indices: int, model: BlockFormat = MODEL) -> None:
    with closing(medium.open()) as store:
        store.open(model.namespace, model.frame_bytes)
        store.write([key(index) for index in indices], [memoryview(frame(index, model)) for index in indices])


def kv(command: str, medium: Medium, *options: str) -> int:
    return main(["kv", command, *medium.arguments, *options])


def test_inspect_tells_blocks_bytes_and_ages_of_each_namespace(medium, capsys):
    assert kv("inspect", medium) == 0
    assert capsys.readouterr().out == "The store is empty.\n"
    fill(medium, 1, 2, 3)
    fill(medium, 4, model=OTHER_MODEL)
    assert kv("inspect", medium) == 0

    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["namespace", "blocks", "bytes", "oldest", "use", "newest", "use"]
    assert [line.split()[:2] for line in lines] == sorted([[MODEL.namespace, "3"], [OTHER_MODEL.namespace, "1"]])
    assert all(line.endswith(" s ago") for line in lines)


def test_inspect_tells_the_size_of_files(tmp_path, capsys):
    directory = Directory(tmp_path)
    fill(directory, *range(8))
    (file,) = tmp_path.glob(f"*/*/{key(3).hex()}.kv")
    os.utime(file, (time.time(), time.time() - 7300))
    assert kv("inspect", directory) == 0
    namespace, *told = capsys.readouterr().out.splitlines()[1].split()
    assert namespace == MODEL.namespace
    assert told[:6] == ["8", f"{8 * MODEL.frame_bytes / 1024:.1f}", "KiB", "2", "h", "ago"]


def test_verify_finds_sound_blocks_sound(medium, capsys):
    fill(medium, 1, 2)
    fill(medium, 3, model=OTHER_MODEL)
    assert kv("verify", medium) == 0
    assert capsys.readouterr().out.endswith("; corrupt: 0\n")


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (flipped(frame(2), HEADER_BYTES), "digest is "),
        (flipped(frame(2), MODEL.frame_bytes - 1), "digest is "),
        (flipped(frame(2), 0), "not a KV block: magic is "),
        (flipped(frame(2), 8), "format version 2 is not 3"),
        (frame(2)[:-1], f"length is {MODEL.frame_bytes - 1}, not {MODEL.frame_bytes}"),
        (frame(2)[:HEADER_BYTES], f"length is {HEADER_BYTES}, not "),
        (frame(2)[:10], "10 bytes are less than a header of 192"),
        (frame(2) + b"\0", f"length is {MODEL.frame_bytes + 1}, not {MODEL.frame_bytes}"),
        (frame(3), f"block_hash is {key(3).hex()}, not {key(2).hex()}"),
        (frame(2, OTHER_MODEL), f"fingerprint is {OTHER_MODEL.namespace}, not {MODEL.namespace}"),
        (pickle.dumps(print).ljust(HEADER_BYTES), "not a KV block: magic is "),
    ],
)
def test_verify_names_what_is_wrong_and_deletes_it_if_asked(tmp_path, content, says, capsys):
    directory = Directory(tmp_path)
    fill(directory, 1, 2)
    directory.replace(2, content)
    assert kv("verify", directory) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert first.startswith(f"corrupt: {MODEL.namespace} {key(2).hex()}: {says}")
    assert summary.endswith("; corrupt: 1")
    assert len(directory.names()) == 2

    assert kv("verify", directory, "--delete-corrupt") == 1
    assert capsys.readouterr().out.endswith("; corrupt: 1, deleted: 1\n")
    assert kv("verify", directory) == 0
    assert {Path(name).stem for name in directory.names()} == {key(1).hex()}


def test_verify_leaves_blocks_of_other_versions_alone(tmp_path, capsys):
    """Their pods may still run."""
    directory = Directory(tmp_path)
    fill(directory, 1, 2)
    ours, theirs = tmp_path / MODEL.namespace, tmp_path / MODEL.namespace.replace("v3-", "v2-")
    shutil.copytree(ours, theirs)
    assert kv("verify", directory, "--delete-corrupt") == 0
    assert capsys.readouterr().out.endswith("; corrupt: 0, deleted: 0; in another version's format, not checked: 2\n")
    assert len(directory.names()) == 4


def test_verify_on_every_medium(medium, capsys):
    fill(medium, 1, 2, 3)
    fill(medium, 4, model=OTHER_MODEL)
    medium.replace(1, flipped(frame(1), 500))
    medium.replace(2, frame(3))
    assert kv("verify", medium, "--namespace", OTHER_MODEL.namespace) == 0
    assert kv("verify", medium, "--delete-corrupt") == 1
    out = capsys.readouterr().out
    assert f"{key(1).hex()}: digest is " in out
    assert f"{key(2).hex()}: block_hash is " in out
    assert len(medium.names()) == 2


def test_what_is_no_string_is_corrupt(capsys):
    with running_redis() as server:
        medium = Redis(server)
        fill(medium, 1)
        with redis.Redis.from_url(server.url) as client:
            client.lpush(f"baton:{MODEL.namespace}:{key(2).hex()}", "x")
        assert kv("verify", medium) == 1
        assert f"{key(2).hex()}: 0 bytes" in capsys.readouterr().out


def test_purge_takes_one_namespace_or_all_and_nothing_foreign(medium, capsys):
    foreign = medium.add_foreign()
    fill(medium, *range(1, 6))
    fill(medium, 6, model=OTHER_MODEL)

    assert kv("purge", medium, "--namespace", OTHER_MODEL.namespace, "--yes") == 0
    assert capsys.readouterr().out == "deleted: 1\n"
    assert len(medium.names() - foreign) == 5
    assert kv("purge", medium, "--all", "--yes") == 0
    assert capsys.readouterr().out == "deleted: 5\n"
    assert medium.names() == foreign


def test_purge_on_several_servers(capsys):
    with running_redis() as first, running_redis() as second:
        media = [Redis(first), Redis(second)]
        both = Redis(first)
        both.url = f"{first.url},{second.url}"
        both.arguments[-1] = f"url={both.url}"
        fill(both, *range(1, 33))
        assert all(medium.names() for medium in media)
        assert kv("verify", both) == 0
        assert kv("purge", both, "--all", "--yes") == 0
        assert capsys.readouterr().out.endswith("deleted: 32\n")
        assert not any(medium.names() for medium in media)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_purge_asks_before_it_deletes(tmp_path, monkeypatch, capsys):
    directory = Directory(tmp_path)
    fill(directory, 1, 2)
    assert kv("purge", directory, "--all") == 2  # pytest's stdin is no terminal
    assert capsys.readouterr().err == "baton: error: --yes: required when stdin is not a terminal\n"
    for answer, num_left in (("\n", 2), ("no\n", 2), ("y\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert kv("purge", directory, "--all") == 0
        assert f"Delete 2 blocks, {2 * MODEL.frame_bytes / 1024:.1f} KiB? [y/N] " in capsys.readouterr().out
        assert len(directory.names()) == num_left


def test_settings_may_come_from_the_file_of_baton_up(tmp_path, capsys):
    fill(Directory(tmp_path / "kv"), 1)
    config = tmp_path / "baton.yaml"
    config.write_text(f"cluster: {{prefill: 2, connector_path: {tmp_path}/kv}}\nprefill: {{block_size: 16}}\n")
    assert main(["kv", "verify", "--config", str(config)]) == 0
    assert capsys.readouterr().out.startswith("blocks: 1, ")
    config.write_text(f"cluster: {{connector_options: {{path: {tmp_path}/kv}}}}\n")
    assert main(["kv", "verify", "--config", str(config)]) == 0
    config.write_text("cluster: {connector_path: [1]}\n")
    assert main(["kv", "verify", "--config", str(config)]) == 2
    assert "cluster.connector_path: expected text" in capsys.readouterr().err


def test_the_store_below_a_direct_connector(medium, tmp_path, capsys):
    config = tmp_path / "baton.yaml"
    config.write_text(f"cluster: {{connector: nixl, connector_options: {{host_bytes: 1GiB, store: {medium.below}}}}}\n")
    fill(medium, 1, 2, 3)
    assert main(["kv", "inspect", "--config", str(config)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [MODEL.namespace, "3"]
    assert main(["kv", "purge", "--config", str(config), "--all", "--yes"]) == 0
    assert not medium.names()


def test_a_store_below_that_fails_on_the_way(capsys):
    with running_redis() as server:
        medium = Redis(server)
        fill(medium, 1)
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "default", "-get")
        assert main(["kv", "verify", *NIXL, "store=redis", "--connector-options", f"store.url={server.url}"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"baton: error: store.url: Redis at 127.0.0.1:{server.port}/0 failed: ")


def test_a_store_that_needs_a_password():
    with running_redis(requirepass="secret") as server:
        medium = Redis(server)
        medium.url = server.url.replace("//", "//:secret@")
        medium.arguments[-1] = f"url={medium.url}"
        fill(medium, 1)
        assert kv("verify", medium) == 0


def test_a_store_behind_tls(tmp_path, capsys):
    authority = create_authority(tmp_path / "authority")
    with running_redis() as server, tls_front(authority, server.port) as port:
        fill(Redis(server), 1)
        options = ["--connector", "redis", "--connector-options", f"url=rediss://localhost:{port}"]
        assert main(["kv", "verify", *options]) == 2
        assert "certificate verify failed" in capsys.readouterr().err
        assert main(["kv", "verify", *options, "--connector-options", f"tls_ca_file={authority.ca_file}"]) == 0


@pytest.fixture(scope="module")
def locked_server() -> Iterator[RedisServer]:
    with running_redis(requirepass="secret") as server:
        yield server


REDIS = ["--connector", "redis", "--connector-options"]
NIXL = ["--connector", "nixl", "--connector-options"]
NIXL_FILES = [*NIXL, "store=shared-storage", "--connector-options"]
NIXL_REDIS = [*NIXL, "store=redis", "--connector-options"]
NO_STORE_BELOW = (
    "connector nixl: connector_options.store: required, as nixl itself keeps no blocks; "
    "name the store below it with store=redis or store=shared-storage\n"
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--connector-path: required for shared-storage"),
        (["--connector-path", "{tmp}/none"], "--connector-path: no directory {tmp}/none"),
        (["--connector-path", "{tmp}/file"], "--connector-path: no directory {tmp}/file"),
        (["--connector-options", "pth=x"], "connector shared-storage: connector_options.pth: unknown setting"),
        (["--connector", "pigeon"], "--connector: 'pigeon' has no store to inspect"),
        (["--connector", "nixl"], NO_STORE_BELOW),
        ([*NIXL, "store.path={tmp}"], NO_STORE_BELOW),
        ([*NIXL, "stor=redis"], "connector nixl: connector_options.stor: unknown setting; did you mean store?"),
        ([*NIXL, "store=memory"], "connector nixl: connector_options.store: 'memory' cannot be inspected; expected "),
        ([*NIXL_FILES[:-1]], "store.path: required for shared-storage"),
        ([*NIXL_FILES, "store.path={tmp}/none"], "store.path: no directory {tmp}/none"),
        ([*NIXL_FILES, "store.pth=x"], "connector shared-storage: connector_options.store.pth: unknown setting"),
        ([*NIXL_REDIS, "store.url=redis://127.0.0.1:1"], "store.url: cannot use Redis at 127.0.0.1:1/0: "),
        ([*REDIS, "url=redis://127.0.0.1:1"], "url: cannot use Redis at 127.0.0.1:1/0: "),
        ([*REDIS, "url=redis://127.0.0.1:{port}"], "url: cannot use Redis at 127.0.0.1:{port}/0: "),
        ([*REDIS, "url=redis://:s3cret@127.0.0.1:{port}"], "url: cannot use Redis at 127.0.0.1:{port}/0: "),
        ([*REDIS, "url=http://127.0.0.1:{port}"], "url: number 1 is not redis://"),
        (["--config", "{tmp}/none.yaml"], "--config: cannot read {tmp}/none.yaml"),
    ],
)
def test_bad_settings_are_one_line_and_code_2(options, says, tmp_path, locked_server, capsys):
    (tmp_path / "file").write_text("")
    fit = {"tmp": tmp_path, "port": locked_server.port}
    assert main(["kv", "inspect", *(option.format(**fit) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("baton: error: " + says.format(**fit))
    assert err.count("\n") == 1
    assert "s3cret" not in err


def test_a_name_that_is_no_namespace(tmp_path, capsys):
    assert main(["kv", "purge", "--connector-path", str(tmp_path), "--namespace", "../x"]) == 2
    assert "argument --namespace: expected a name such as v3-0123456789abcdef-16, got '../x'" in capsys.readouterr().err


def test_a_store_that_fails_on_the_way(capsys):
    with running_redis() as server:
        medium = Redis(server)
        fill(medium, 1)
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "default", "-unlink", "-get")
        for command in ("verify", "purge --all --yes"):
            name, *options = command.split()
            assert kv(name, medium, *options) == 2
            message = capsys.readouterr().err
            assert message.startswith(f"baton: error: url: Redis at 127.0.0.1:{server.port}/0 failed: ")
            assert message.count("\n") == 1


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    directory = Directory(tmp_path)
    fill(directory, 1)

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", refuse)  # whoever runs this may be allowed everything
    assert kv("purge", directory, "--all", "--yes") == 2
    message = capsys.readouterr().err
    assert message.startswith("baton: error: --connector-path: shared storage failed: [Errno 13] Permission denied")
    assert message.count("\n") == 1


def test_no_redis_client(tmp_path):
    script = "import sys; sys.modules['redis'] = None; from cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "kv", "inspect", "--connector", "redis"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("baton: error: --connector: redis needs the extra 'redis'")


def test_the_store_is_that_of_the_cluster_in_the_background(tmp_path, capsys):
    fill(Directory(tmp_path), 1, 2)
    claimed = claim("mine")
    state = ClusterState("mine", 1, 1, store=StoreState("shared-storage", str(tmp_path), {}))
    claimed.save(state)
    for options in ([], ["--name", "mine"]):
        assert main(["kv", "verify", *options]) == 0
        assert capsys.readouterr().out.startswith("blocks: 2, ")
    assert main(["kv", "verify", "--name", "mine", "--connector", "redis"]) == 2
    assert "--name: the cluster knows its store" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert main(["kv", "inspect", "--connector-path", str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out == "The store is empty.\n"
    state.store = None
    claimed.save(state)
    assert main(["kv", "inspect"]) == 2
    assert "the cluster mine has no store of KV blocks" in capsys.readouterr().err
    os.close(claimed.lock)
