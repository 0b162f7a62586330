"""The LoRA adapters of a model's pods. Pods are the truth: a name stands for what they say, by the highest revision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.errors import InvalidRequestError, quoted
from common.pb import pods_pb2
from common.rpc.convert import adapter_name_from_pb
from common.types import ADAPTER_DIGEST_BYTES, AdapterName

_MAX_ADAPTERS = 4096  # names, and digests, that a pod may report
_MAX_CHARS = 4096  # of a name or a path


class ReportedAdapters:
    """The adapters that one pod has reported."""

    def __init__(self, names: Mapping[str, AdapterName], loaded: frozenset[bytes]) -> None:
        """`names` has those that were taken away as well; `loaded` the digests that requests may have."""
        self.names = names
        self.loaded = loaded

    @classmethod
    def of(cls, message: pods_pb2.PodAdapters) -> ReportedAdapters:
        """Reads a report. Raises InvalidRequestError if it is invalid."""
        names = [adapter_name_from_pb(each) for each in message.names]
        digests = [*message.loaded, *(name.digest for name in names if name.digest)]
        if max(len(names), len(message.loaded)) > _MAX_ADAPTERS:
            raise InvalidRequestError(f"more than {_MAX_ADAPTERS} adapters")
        if any(len(digest) != ADAPTER_DIGEST_BYTES for digest in digests):
            raise InvalidRequestError(f"a digest has not {ADAPTER_DIGEST_BYTES} bytes")
        if wrong := [
            each.name for each in names if not 0 < len(each.name) <= _MAX_CHARS or len(each.path) > _MAX_CHARS
        ]:
            raise InvalidRequestError(f"an invalid name or path of {quoted(wrong[0])}")
        return cls({name.name: name for name in names}, frozenset(message.loaded))

    def lacks(self, wanted: AdapterName) -> bool:
        """Whether the pod must be told of a name. One of its settings it does not give up, and one that was taken away
        it need not know."""
        known = self.names.get(wanted.name)
        if known is None:
            return bool(wanted.digest)
        return not known.is_permanent and known.order < wanted.order


class AdapterTable:
    """The names of one model's adapters, as its pods have them and as this router has just changed them."""

    def __init__(self) -> None:
        self.latest: Mapping[str, AdapterName] = {}  # those that were taken away included
        self.served: Mapping[str, AdapterName] = {}  # those that requests may name
        self._said: dict[str, AdapterName] = {}  # by this router, until a pod reports it

    def say(self, name: AdapterName) -> None:
        """This router has changed a name. It holds here at once, see `settle`."""
        self._said[name.name] = name

    def settle(self, reports: Iterable[ReportedAdapters]) -> None:
        """Takes what all pods report now."""
        latest: dict[str, AdapterName] = {}
        for report in reports:
            for name in report.names.values():
                if name.name not in latest or latest[name.name].order < name.order:
                    latest[name.name] = name
        self._said = {
            name: said for name, said in self._said.items() if name not in latest or latest[name].order < said.order
        }
        self.latest = latest | self._said
        self.served = {name: each for name, each in self.latest.items() if each.digest}
