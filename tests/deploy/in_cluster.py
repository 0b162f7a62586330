"""Runs `baton` as in a pod of a cluster: the names of its services resolve to the addresses in a file.

    python -m tests.deploy.in_cluster NAMES INTERVAL SPEED serve router ...

NAMES is a JSON file {name: [address, ...]}, looked up every INTERVAL seconds. Routers try pods again SPEED times as
often as usual.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cli.main import main
from router.discovery.dns import DnsDiscovery
from router.pods import pod


def run() -> int:
    names, interval_s, speed, *arguments = sys.argv[1:]

    def look_up(name: str) -> list[str] | None:
        return json.loads(Path(names).read_text()).get(name)

    async def resolve(name: str, _port: int) -> list[str]:
        addresses = look_up(name)
        if addresses is None:
            raise OSError(f"{name}: not known")
        return addresses

    defaults = DnsDiscovery.__init__.__kwdefaults__
    assert defaults is not None
    DnsDiscovery.__init__.__defaults__ = (resolve,)
    defaults["interval_s"] = float(interval_s)
    pod.MAX_BACKOFF_S /= float(speed)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
