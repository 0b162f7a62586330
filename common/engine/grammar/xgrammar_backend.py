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
_ASSERTION = re.compile(r"^Check failed: \(.*?\) is false: ")  # C++, before some of them

_TYPES_WITH_SCHEMA = ("json_schema", "qwen_xml_parameter")  # of parts of structural tags


class XgrammarBackend:
    """See GrammarBackend."""

    def __init__(self, vocabulary: Vocabulary, max_whitespace: int) -> None:
        self._max_whitespace = max_whitespace
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
                return compiler.compile_structural_tag(self._tag_of(json.loads(text)))

    def _compile_schema(self, schema: str, constraint: Constraint) -> xgrammar.CompiledGrammar:
        if constraint.any_whitespace and self._max_whitespace:
            return self._compiler.compile_json_schema(schema, max_whitespace_cnt=self._max_whitespace)
        return self._compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))

    def _tag_of(self, tag: dict[str, Any]) -> str:
        """The library's form of a structural tag. It has no way to say that its JSON has no whitespace."""
        return json.dumps(_with_whitespace(_structural_tag(tag), max(1, self._max_whitespace)))


class _Grammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def matcher(self) -> Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled))


class _Matcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

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


def _with_whitespace(part: Any, max_whitespace: int) -> Any:
    """A part of a structural tag, with a bound of the whitespace of its JSON where it gives none."""
    if isinstance(part, list):
        return [_with_whitespace(each, max_whitespace) for each in part]
    if not isinstance(part, dict):
        return part
    bounded = {
        name: value if name == "json_schema" else _with_whitespace(value, max_whitespace)
        for name, value in part.items()
    }
    if part.get("type") in _TYPES_WITH_SCHEMA and part.get("max_whitespace_cnt") is None:
        bounded["max_whitespace_cnt"] = max_whitespace
    return bounded


def _problem(error: Exception) -> str:
    return _ASSERTION.sub("", _ORIGIN.sub("", str(error).strip())).strip()
