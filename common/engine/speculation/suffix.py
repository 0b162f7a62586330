"""Proposes what most often followed the longest match of a request's last tokens, in its own prompt and output and in
outputs of earlier requests (after SuffixDecoding, G. Oliaro et al., arXiv 2411.04975; without its trees, which take a
hundred times the memory in Python)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from common.engine.config import EngineConfig
from common.engine.speculation.base import Context
from common.engine.speculation.history import History
from common.engine.speculation.ngram import continue_from, find_longest_match
from common.engine.speculative import MAX_MATCH, SuffixOptions

_MIN_OWN_MATCH = 2  # tokens
_MAX_COUNTED = 16  # places in the request's own tokens, the last ones


class SuffixProposer:
    """Drafts are no more than the tokens that match, and end where what followed so far agrees in less than half of the
    places. Learns outputs as requests end."""

    def __init__(self, options: SuffixOptions) -> None:
        self._depth = options.depth
        self._memory = options.memory
        self.reset()

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer."""
        return [self._drafts(request) for request in requests]

    def forget(self, requests: Sequence[Context]) -> None:
        """See Proposer. With each output go the last tokens of its prompt, after which it begins."""
        for request in requests:
            if len(request.token_ids) > request.num_prompt_tokens:
                self._history.add(request.root, request.token_ids[max(0, request.num_prompt_tokens - MAX_MATCH) :])

    def reset(self) -> None:
        """See Proposer."""
        self._history = History(self._memory)

    def check(self) -> list[str]:
        """See Proposer."""
        return self._history.check()

    def _drafts(self, request: Context) -> list[int]:
        token_ids = request.token_ids
        own = find_longest_match(token_ids, MAX_MATCH)
        found = self._history.find(request.root, token_ids, self._depth)
        length = max(own.length, found.length)
        if length < _MIN_OWN_MATCH:
            return []
        depth = min(self._depth, length)
        followed: list[list[int]] = []
        if own.length == length:
            followed += continue_from(token_ids, own.ends[: -_MAX_COUNTED - 1 : -1], depth)
        if found.length == length:
            followed += found.continuations
        return most_likely(followed, depth)


def most_likely(followed: Sequence[Sequence[int]], depth: int) -> list[int]:
    """The tokens, one after the other, on which most of what followed before agrees; the first of equals. Ends where
    less than half agrees on all so far."""
    num_all = len(followed)
    drafts: list[int] = []
    for place in range(depth):
        followed = [tokens for tokens in followed if len(tokens) > place]
        if not followed:
            break
        next_ids = [tokens[place] for tokens in followed]
        token_id = next_ids[0]
        if 2 * next_ids.count(token_id) < num_all:
            token_id, count = Counter(next_ids).most_common(1)[0]
            if 2 * count < num_all:
                break
        drafts.append(token_id)
        followed = [tokens for tokens in followed if tokens[place] == token_id]
    return drafts


def create(config: EngineConfig) -> SuffixProposer:
    """A ProposerFactory."""
    method = config.speculation.method
    assert method is not None
    assert isinstance(method.options, SuffixOptions)
    return SuffixProposer(method.options)
