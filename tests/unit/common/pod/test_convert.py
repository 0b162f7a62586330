import msgspec
import pytest

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.messages import EngineSpec
from common.errors import BatonError, InvalidRequestError
from common.pb import common_pb2
from common.pod.convert import add_request_from_pb, layout_from_pb, layout_to_pb
from common.types import ExtraKey, PromptPositions, SamplingParams
from tests.pods import engine_request, prompt_of

SPEC = EngineSpec(
    fingerprint=b"f", layout=KVLayout(4, ()), num_blocks=9, max_model_len=32, vocab_size=500, max_num_seqs=4,
    max_num_batched_tokens=64, device="cpu", dtype="float32", bytes_per_block=1,
)  # fmt: skip


def extra_key(start: int, end: int, digest: bytes = b"digest") -> common_pb2.ExtraKey:
    return common_pb2.ExtraKey(start=start, end=end, digest=digest)


def test_request_becomes_what_the_engine_takes() -> None:
    prompt = prompt_of(10)
    keys = [extra_key(4, 6)]
    message = engine_request("a", prompt, output_token_ids=[1, 2], cache_salt="salt", priority=-1, extra_keys=keys)
    request = add_request_from_pb(message, SPEC)
    assert (request.request_id, request.prompt_token_ids, request.output_token_ids) == ("a", prompt, [1, 2])
    assert (request.cache_salt, request.priority) == ("salt", -1)
    assert request.extra_keys == [ExtraKey(4, 6, b"digest")]
    assert request.sampling == SamplingParams(temperature=0.0, max_tokens=8, seed=0)


def test_layout_comes_back_from_the_wire() -> None:
    groups = KVGroupSpec((0, 2), 8, 64, 48, "bfloat16"), KVGroupSpec((1,), 8, 64, 64, "float16", "window", 9)
    layout = KVLayout(16, groups, 2, (1, 1), 3)
    assert layout_from_pb(layout_to_pb(layout)) == layout


def test_positions_become_what_the_engine_takes() -> None:
    message = engine_request("a", [5, 6, 7, 8], positions=positions([0, 1, 1, 2], [0, 1, 4, 5]))
    request = add_request_from_pb(message, msgspec.structs.replace(SPEC, position_dims=2))
    assert request.positions == PromptPositions([[0, 1, 1, 2], [0, 1, 4, 5]], 2)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[0, 1, 2]], "positions have 1 dimensions, those of the model 2"),
        ([[0, 1, 2]] * 3, "positions have 3 dimensions, those of the model 2"),
        ([[0, 1, 2], [0, 1]], "positions of 2 tokens in a prompt of 3"),
        ([[], []], "positions of 0 tokens in a prompt of 3"),
        ([[0, 1, 2], [0, 1, 1 << 31]], "positions must be from 0 to 2147483647"),
    ],
)
def test_positions_that_do_not_fit_are_refused(values: list[list[int]], says: str) -> None:
    message = engine_request("a", [5, 6, 7], positions=positions(*values))
    with pytest.raises(InvalidRequestError, match=says):
        add_request_from_pb(message, msgspec.structs.replace(SPEC, position_dims=2))


def test_models_whose_positions_are_places_take_no_others() -> None:
    message = engine_request("a", [5, 6, 7], positions=positions([0, 1, 2]))
    with pytest.raises(InvalidRequestError, match="positions: the model's are the tokens' places in the prompt"):
        add_request_from_pb(message, SPEC)


def positions(*values: list[int]) -> list[common_pb2.Positions]:
    return [common_pb2.Positions(values=each) for each in values]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prompt": prompt_of(25)}, "prompt_token_ids"),
        ({"output_token_ids": [500]}, "output_token_ids"),
        ({"output_token_ids": [1] * 8}, "output_token_ids"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(stop_token_ids=(500,))}, "stop_token_ids"),
        ({"extra_keys": [extra_key(4, 11)]}, "extra_keys"),
        ({"extra_keys": [extra_key(4, 4)]}, "extra_keys"),
        ({"extra_keys": [extra_key(4, 6), extra_key(5, 7)]}, "extra_keys"),
        ({"extra_keys": [extra_key(4, 6, b"")]}, "extra_keys"),
        ({"extra_keys": [extra_key(4, 6, b"x" * 65)]}, "extra_keys"),
        ({"extra_keys": [extra_key(4, 6)] * 1025}, "extra_keys"),
    ],
)
def test_unfit_request_is_refused_by_name(fields: dict, param: str) -> None:
    arguments = {"request_id": "a", "prompt": prompt_of(10), **fields}
    with pytest.raises(BatonError) as caught:
        add_request_from_pb(engine_request(**arguments), SPEC)
    assert caught.value.param == param
