"""Baton with n-gram speculation."""

from __future__ import annotations

from functools import partial

from benchmarks.compare.baton_side import load
from benchmarks.compare.side import serve

if __name__ == "__main__":
    serve(partial(load, speculative="ngram"))
