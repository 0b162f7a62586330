"""Tables of pods for tests of policies."""

from __future__ import annotations

from router.placing.policies import Candidates, Leg, Load, PodFacts, PodTable, RequestFacts

FACTS = PodFacts(
    address="", slot=0, connector="fake", num_blocks=100, max_num_seqs=100, max_num_batched_tokens=1000,
    max_model_len=100_000, target_itl_s=0.05, min_prefill_tokens=64,
)  # fmt: skip
IDLE = Load(num_requests=0, queued_tokens=0, free_blocks=100, context_tokens=0, slowness=1)
REQUEST = RequestFacts(num_prompt_tokens=320, block_size=16, expected_output_tokens=100)


def table_of(**pods: dict) -> PodTable:
    """A table of pods by address; each differs from an idle one in these values."""
    table = PodTable()
    for slot, (address, differences) in enumerate(pods.items()):
        facts = {name: value for name, value in differences.items() if name in PodFacts._fields}
        load = {name: value for name, value in differences.items() if name in Load._fields}
        assert len(facts) + len(load) == len(differences)
        table.add(FACTS._replace(address=address, slot=slot, **facts), IDLE._replace(**load))
    return table


def candidates_of(table: PodTable, cached: dict[str, int] | None = None, leg=Leg.PREFILL, **request) -> Candidates:
    """The pods of a table and a request of which pods hold so many `cached` tokens."""
    candidates = Candidates(REQUEST.__class__(**{**_fields(REQUEST), **request}), leg, table.columns())
    for number, facts in enumerate(candidates.pods.facts):
        candidates.cached_tokens[number] = (cached or {}).get(facts.address, 0)
    return candidates


def _fields(request: RequestFacts) -> dict:
    return {name: getattr(request, name) for name in RequestFacts.__slots__}


def chosen(policy, candidates: Candidates, times: int = 1) -> list[str]:
    """Addresses of the pods that get so many such requests one after the other."""
    addresses = []
    for _ in range(times):
        facts = candidates.pods.facts[policy.pick(candidates, policy.judge(candidates))]
        policy.note(facts.slot)
        addresses.append(facts.address)
    return addresses
