"""Constrained output by xgrammar."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar

from common.engine.grammar.base import CompiledGrammar, Matcher, Vocabulary
from common.errors import InvalidRequestError
from common.types import Constraint, ConstraintKind

_ORIGIN = re.compile(r"^\[[\d:]+\] \S+: ")  # time and source line, which the library puts before its errors


class XgrammarBackend:
    """See GrammarBackend."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=sorted(vocabulary.eos_token_ids),
        )
        # One thread: a pod's cores are for its steps. What is compiled is cached elsewhere.
        self._compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """See GrammarBackend."""
        if constraint.whitespace_pattern:
            raise InvalidRequestError("whitespace_pattern is not supported by the grammar backend xgrammar")
        try:
            return _Grammar(self._compile(constraint))
        except (KeyError, TypeError) as error:
            raise InvalidRequestError(f"the structural tag is malformed: {error}") from error
        except (RuntimeError, ValueError) as error:  # of which the library's own errors are
            raise InvalidRequestError(_problem(error)) from error

    def _compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        text, compiler = constraint.text, self._compiler
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                return self._compile_schema(text, constraint)
            case ConstraintKind.JSON_OBJECT:
                return self._compile_schema('{"type": "object", "additionalProperties": true}', constraint)
            case ConstraintKind.REGEX:
                return compiler.compile_regex(text)
            case ConstraintKind.CHOICE:
                return compiler.compile_grammar(_grammar_of_choices(json.loads(text)))
            case ConstraintKind.GRAMMAR:
                return compiler.compile_grammar(text)
            case ConstraintKind.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(json.dumps(_structural_tag(json.loads(text))))

    def _compile_schema(self, schema: str, constraint: Constraint) -> xgrammar.CompiledGrammar:
        if constraint.any_whitespace:
            return self._compiler.compile_json_schema(schema)
        return self._compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))


class _Grammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled
        self.num_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled))


class _Matcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        if self._matcher.is_terminated():
            mask[:] = 0
        elif not self._matcher.fill_next_token_bitmask(mask[None]):
            mask[:] = -1  # the library leaves a mask that allows everything as it is


def _grammar_of_choices(choices: list[str]) -> str:
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)


def _structural_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """The library's present form, of that or of the older one of OpenAI-style servers, with `structures`."""
    if "structures" not in tag:
        return {"type": "structural_tag", **tag}
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"]},
            "end": each["end"],
        }
        for each in tag["structures"]
    ]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags},
    }


def _problem(error: Exception) -> str:
    return _ORIGIN.sub("", str(error).strip()).strip()
