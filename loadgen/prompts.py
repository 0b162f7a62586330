"""Texts of a given number of tokens: words drawn at random, the same for the same key.

With a tokenizer, the words are tokens of its vocabulary, one each, and lengths are exact. Without one they are English,
and how many tokens the endpoint makes of a word is measured with two requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from common.errors import BatonError, ConfigError, UnreachableError
from loadgen.endpoint import UNREACHED, Endpoint
from loadgen.samples import Sample

_LEAST_WORDS = 100  # of a vocabulary that prompts are made of
_CHECKED_WORDS = 64
_PROBED_WORDS = (64, 320)
_UNKNOWN_RATIO = 1.3  # tokens of an English word, where nothing says it

_ENGLISH = tuple(
    """
    able above across act add after again air all along also always among and animal another answer any appear apple
    area arm around ask away back ball bank base bear beauty bed before begin behind believe bell best better
    between big bird black blood blue board boat body bone book both bottom box boy branch bread break bright bring
    brother brown build burn busy buy call camp can capital captain car card care carry case catch cause center
    century certain chair chance change chart check chief child choose church circle city claim class clean clear
    climb clock close cloth cloud coast coat cold color common company compare complete condition connect consider
    contain control cook cool copy corn corner correct cost cotton count country course cover create cross crowd cry
    current cut dance danger dark day dead deal dear death decide deep degree depend describe desert design
    determine develop dictionary difference direct discuss distant divide doctor dog dollar door double down draw
    dream dress drink drive drop dry during each early earth ease east eat edge effect egg electric element end
    enemy energy engine enough enter equal even evening event ever every exact example except excite exercise expect
    experience experiment eye face fact fair fall family famous far farm fast father favor fear feed feel feet few
    field fight figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow
    food foot force forest form forward found four fraction free fresh friend from front fruit full game garden gas
    gather general gentle girl give glad glass gold good govern grand grass gray great green ground group grow guess
    guide hair half hand happen happy hard hat head hear heart heat heavy help here high hill history hit hold hole
    home hope horse hot hour house huge human hundred hunt hurry ice idea imagine inch include indicate industry
    insect instant instrument interest iron island job join joy jump just keep key kind king know lady lake land
    language large last late laugh law lay lead learn least leave left leg length less letter level lie life lift
    light like line liquid list listen little live locate log lone long look lost lot loud love low machine magnet
    main major make man many map mark market mass master match material matter may mean measure meat meet melody men
    metal method middle might mile milk million mind mine minute miss mix modern molecule moment money month moon
    more morning most mother motion mount mountain mouth move much multiply music
    """.split()  # noqa: SIM905  (a list of literals would be five times as long)
)


class WordSource(NamedTuple):
    """The words that texts are made of."""

    words: Sequence[str]
    tokens_per_word: float = 1.0
    lead: str = ""  # before the first word of a prompt

    def words_for(self, num_tokens: float, key: str) -> str:
        """Returns words of about so many tokens, the same for the same key."""
        count = max(1, round(num_tokens / self.tokens_per_word))
        return " ".join(random.Random(key).choices(self.words, k=count))

    def prompt(self, *parts: str) -> str:
        """Puts the parts of a prompt together."""
        return self.lead + " ".join(part for part in parts if part)


def words_of_tokenizer(path: Path) -> WordSource:
    """Returns a source of exact lengths for the tokenizer in a directory or a tokenizer.json. Raises ConfigError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer: {path} has no tokenizer.json; name a model's directory", param="tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"--tokenizer: {file} cannot be read: {error}", param="tokenizer") from error
    words = sorted(
        token[1:]
        for token in tokenizer.get_vocab()
        if token[:1] in ("\u0120", "\u2581") and token[1:].isalpha() and token[1:].isascii() and token[1:].islower()
    )
    if len(words) < _LEAST_WORDS:
        return WordSource(_ENGLISH, _tokens_per_word(tokenizer))
    sample = random.Random(0).choices(words, k=_CHECKED_WORDS)
    for lead in (" ", ""):
        if _count(tokenizer, lead + " ".join(sample)) == _CHECKED_WORDS:
            return WordSource(words, lead=lead)
    return WordSource(_ENGLISH, _tokens_per_word(tokenizer))


def _count(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _tokens_per_word(tokenizer: tokenizers.Tokenizer) -> float:
    return _count(tokenizer, " ".join(_ENGLISH)) / len(_ENGLISH)


async def words_of_endpoint(endpoint: Endpoint) -> WordSource:
    """Returns English words, with the number of tokens that the endpoint counts for one. Raises BatonError if it cannot
    be asked."""
    counts = []
    for number in _PROBED_WORDS:
        sample = await check_endpoint(endpoint, WordSource(_ENGLISH).words_for(number, "probe"))
        counts.append(sample.num_prompt_tokens)
    few, many = _PROBED_WORDS
    ratio = (counts[1] - counts[0]) / (many - few)
    return WordSource(_ENGLISH, ratio if ratio > 0 else _UNKNOWN_RATIO)


async def check_endpoint(endpoint: Endpoint, text: str) -> Sample:
    """Sends one request for one token. Raises UnreachableError or BatonError if it fails."""
    sample = Sample(due_s=None)
    await endpoint.ask(text, 1, sample)
    if sample.failure is not None:
        is_reached = sample.failure.kind not in UNREACHED
        raise (BatonError if is_reached else UnreachableError)(
            f"the first request failed ({sample.failure.kind}): {sample.failure.message}"
        )
    return sample
