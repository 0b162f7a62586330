"""Inspects a store from outside, whether or not pods use it: lists, verifies and removes blocks."""

from __future__ import annotations

from kv_store.inspection.base import NAMESPACE, StoredBlock, StoreInspector
from kv_store.inspection.registry import INSPECTABLE, open_inspector
from kv_store.inspection.verification import find_problem, is_checked

__all__ = ["INSPECTABLE", "NAMESPACE", "StoreInspector", "StoredBlock", "find_problem", "is_checked", "open_inspector"]
