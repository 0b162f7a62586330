"""Looking into a store from outside, while pods use it or not: what is there, whether it is sound, and its removal."""

from __future__ import annotations

from kv_store.inspection.base import NAMESPACE, StoredBlock, StoreInspector
from kv_store.inspection.registry import INSPECTABLE, open_inspector
from kv_store.inspection.verification import find_problem

__all__ = ["INSPECTABLE", "NAMESPACE", "StoreInspector", "StoredBlock", "find_problem", "open_inspector"]
