"""The value of the setting `speculative`."""

from __future__ import annotations

import re

import pytest

from common.config import Section, build, parse, to_arguments
from common.engine.config import SpeculationConfig
from common.engine.llm import engine_config
from common.engine.speculative import DraftModelOptions, Eagle3Options, MtpOptions, NgramOptions, SuffixOptions
from common.errors import ConfigError
from decode_service.config import DecodeConfig
from deploy.cluster_config import parse_cluster
from prefill_service.config import PrefillConfig

GOOD = {
    "ngram": NgramOptions(),
    "ngram:depth=16,min=3,max=3": NgramOptions(depth=16, min=3, max=3),
    "suffix:depth=1, memory=2MiB": SuffixOptions(depth=1, memory=2 << 20),
    "suffix:": SuffixOptions(),
    "draft:model=some/model": DraftModelOptions(model="some/model"),
    "draft:model=/a:b,depth=1,revision=v1": DraftModelOptions(model="/a:b", depth=1, revision="v1"),
    "eagle3:model=some/head": Eagle3Options(model="some/head"),
    "eagle3:model=/a:b,depth=1,revision=v1": Eagle3Options(model="/a:b", depth=1, revision="v1"),
    "mtp": MtpOptions(),
    "mtp:depth=3": MtpOptions(depth=3),
    "some.module:create": None,
}
BAD = {
    "ngrams": "--speculative: 'ngrams' is none of ngram, suffix, draft, eagle3, mtp, and not a module:factory",
    "ngrams:depth=3": "--speculative: 'ngrams:depth=3' is none of",
    "ngram:deep=3": "--speculative: ngram has no option 'deep=3'; it has depth, min, max",
    "ngram:depth": "--speculative: ngram has no option 'depth'",
    "ngram:memory=1GiB": "--speculative: ngram has no option 'memory=1GiB'",
    "ngram:depth=0": "--speculative: ngram:depth: must be >= 1, got 0",
    "ngram:depth=100": "--speculative: ngram:depth: must be <= 16, got 100",
    "ngram:depth=many": "--speculative: ngram:depth: expected an integer, got 'many'",
    "ngram:depth=5,depth=6": "--speculative: ngram: depth is given twice",
    "ngram:min=3,max=2": "--speculative: ngram: min is 3, above max, which is 2",
    "draft": "--speculative: draft: model is missing, as in draft:model=PATH_OR_ID,depth=4",
    "draft:depth=3": "--speculative: draft: model is missing",
    "draft:model=m,depth=0": "--speculative: draft:depth: must be >= 1, got 0",
    "draft:model=m,depth=100": "--speculative: draft:depth: must be <= 16, got 100",
    "draft:model=m,max=3": "--speculative: draft has no option 'max=3'; it has model, depth, revision",
    "eagle3": "--speculative: eagle3: model is missing, as in eagle3:model=PATH_OR_ID,depth=4",
    "eagle3:model=m,depth=0": "--speculative: eagle3:depth: must be >= 1, got 0",
    "eagle3:model=m,depth=100": "--speculative: eagle3:depth: must be <= 16, got 100",
    "mtp:depth=0": "--speculative: mtp:depth: must be >= 1, got 0",
    "mtp:model=m": "--speculative: mtp has no option 'model=m'; it has depth",
    "suffix:depth=17": "--speculative: suffix:depth: must be <= 16, got 17",
    "suffix:memory=1": "--speculative: suffix:memory: must be >= 1048576, got 1",
    "suffix:memory=lots": "--speculative: suffix:memory: expected a size such as 512MiB or 4GB, got 'lots'",
}


@pytest.mark.parametrize("text", GOOD)
def test_method_and_options(text: str) -> None:
    method = build(DecodeConfig, None, {"speculative": text}).engine_config().speculation.method
    assert method is not None
    assert method.name == (text if GOOD[text] is None else text.partition(":")[0])
    assert method.options == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_value_is_one_line_that_names_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(BAD[text])) as caught:
        parse(DecodeConfig, [f"--speculative={text}"], prog="pod", section="decode")
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match="^" + re.escape(BAD[text])):
        parse_cluster([f"--speculative={text}"])
    in_file = BAD[text].replace("--speculative", "baton.yaml: decode.speculative")
    with pytest.raises(ConfigError, match="^" + re.escape(in_file)):
        build(DecodeConfig, None, Section({"speculative": text}, source="baton.yaml", path="decode"))
    with pytest.raises(ConfigError, match="^" + re.escape(BAD[text].removeprefix("--"))) as caught:
        engine_config("", speculative=text)
    assert caught.value.param == "speculative"


def test_decode_pods_propose_and_prefill_pods_do_not() -> None:
    cluster = parse_cluster(["--speculative", "ngram:depth=3"]).config
    assert "--speculative=ngram:depth=3" in to_arguments(cluster)
    for text, is_head in (("mtp", True), ("suffix", False)):
        given = {"speculative": text}
        decode, prefill = (build(each, None, given).engine_config() for each in (DecodeConfig, PrefillConfig))
        assert decode.speculation == SpeculationConfig(speculative=text)
        assert prefill.speculation == SpeculationConfig()
        assert (prefill.for_heads is not None) == is_head
        assert decode.for_heads is None


def test_none_is_none() -> None:
    assert build(DecodeConfig, None, {"speculative": None}).engine_config().speculation.method is None
    assert engine_config("", speculative="none").speculation.method is None
