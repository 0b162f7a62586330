"""Tool calls and reasoning in the texts of each family of models, wherever these are cut."""

from __future__ import annotations

import itertools
import json
from importlib.metadata import EntryPoint

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.types import FinishReason
from router.dispatching.text_generation import TextDelta
from router.fairness.tenant import Tenant
from router.replies import harmony, reasoning, splits
from router.replies.reasoning import find_reasoning_style
from router.replies.reply import Call, Reasoning, ReplyOptions, ReplyParser, Text
from router.replies.tools import qwen3_coder, registry
from router.replies.tools.base import MAX_CALL_CHARS, ToolCall, ToolParser
from router.replies.tools.json_array import JsonArrayParser
from router.replies.tools.registry import load_tool_parser
from tests.work import LineCounter

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "s": {"type": "string"},
            "x": {"type": ["number", "boolean"]},
            "o": {"type": "object"},
        },
    },
}
OSLO, ARGUMENTS = '{"name": "weather", "arguments": {"city": "Oslo"}}', '{"city": "Oslo"}'
CALL = ToolCall("weather", ARGUMENTS)
FAMILIES = {
    name: load_tool_parser(name) for name in ("hermes", "llama3_json", "mistral", "pythonic", "harmony", "qwen3_coder")
}
FAMILIES["json_array"] = JsonArrayParser

# What each text is: texts and calls, in order. White space beside calls counts as text here.
EXAMPLES = {
    "hermes": [
        (f"<tool_call>\n{OSLO}\n</tool_call>", [CALL]),
        (f"I look.\n<tool_call>{OSLO}</tool_call>\n<tool_call>{OSLO}</tool_call> Done",
         ["I look.\n", CALL, "\n", CALL, " Done"]),
        ('<tool_call>{"name": "add", "arguments": {"s": "</tool_call>}{\\"\\u00e9", "x": [-2e3, null]}}</tool_call>',
         [ToolCall("add", '{"s": "</tool_call>}{\\"\\u00e9", "x": [-2e3, null]}')]),
        ('<tool_call>{"name": "add"}</tool_call>', [ToolCall("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("add", '{"a": 1}')]),
        (f"<tool_call>{OSLO[:-1]}</tool_call><tool_call>{OSLO}</tool_call>",
         [f"<tool_call>{OSLO[:-1]}</tool_call>", CALL]),
        (f"<tool_<tool_call>{OSLO}</tool<tool_call>{OSLO}</tool_call>",
         [f"<tool_<tool_call>{OSLO}</tool", CALL]),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "Oslo"}}', [CALL]),
        (f"<|python_tag|>{OSLO}; {OSLO}", [CALL, CALL]),
        (f"{OSLO}\nand so on", [CALL, "\nand so on"]),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{OSLO}]", [CALL]),
        (f"Let me see.[TOOL_CALLS] [{OSLO}, {OSLO}]", ["Let me see.", CALL, CALL]),
        (f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]add[ARGS]{{}}", [CALL, ToolCall("add", "{}")]),
        (f"[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{ARGUMENTS}", [CALL]),
        (f"[TOOL_CALLS][{OSLO}, {{}}]", [CALL, ", {}]"]),
    ],
    "pythonic": [
        ("[weather(city='Oslo')]", [ToolCall("weather", '{"city":"Oslo"}')]),
        ("[add(a=-1, b=[1.5, True, null], c={'k': (None,)}), weather(city=\"O)sl\\\"o\")]",
         [ToolCall("add", '{"a":-1,"b":[1.5,true,null],"c":{"k":[null]}}'),
          ToolCall("weather", '{"city":"O)sl\\"o"}')]),
        ("<|python_start|>[add()]<|python_end|>", [ToolCall("add", "{}")]),
        ("[add(a=1), weather(city=", [ToolCall("add", '{"a":1}'), ", weather(city="]),
    ],
    "harmony": [
        (f"<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS}<|call|>", [CALL]),
        (f"Hm.<|channel|>commentary to=functions.weather <|constrain|>json<|message|> {ARGUMENTS}", ["Hm.", CALL]),
        ("<|channel|>commentary to=weather<|message|>{}\n<|call|> <|channel|>analysis to=functions.add<|message|>{}",
         [ToolCall("weather", "{}"), " ", ToolCall("add", "{}")]),
        ("<|channel|>final<|message|>{}<|channel|>x to=functions.add<|message|>{} a",
         ["<|channel|>final<|message|>{}", ToolCall("add", "{}"), " a"]),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
         [ToolCall("weather", '{"city":"Oslo"}')]),
        (("I look.\n<tool_call><function=add></function></tool_call>\n"
          "<tool_call><function=x><parameter=a>1</parameter></function></tool_call> Done"),
         ["I look.\n", ToolCall("add", "{}"), "\n", ToolCall("x", '{"a":"1"}'), " Done"]),
        (("<tool_call><function=add><parameter=a>\n-7\n</parameter><parameter=b>\n[1, {\"k\": null}]\n</parameter>"
          "<parameter=s>\n\n7 </x>\n</parameter><parameter=x>True</parameter><parameter=o>{\"a\":1}</parameter>"
          "</function></tool_call>"),
         [ToolCall("add", '{"a":-7,"b":[1, {"k": null}],"s":"\\n7 </x>","x":true,"o":{"a":1}}')]),
        (("<tool_call><function=add><parameter=a>1e999</parameter><parameter=b>None</parameter><parameter=x>2.0"
          "</parameter><parameter=o>[1]</parameter></function></tool_call>"),
         [ToolCall("add", '{"a":"1e999","b":null,"x":2.0,"o":"[1]"}')]),
        (("I look.\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n"
          "<function=add></function> </tool_call></tool_call>"),
         ["I look.\n", ToolCall("weather", '{"city":"Oslo"}'), "\n\n", ToolCall("add", "{}"), " </tool_call>"]),
    ],
    "json_array": [(f" [{OSLO},\n{OSLO}] ", [CALL, CALL, " "])],
}  # fmt: skip
# What looks like a call and is none, or never ends.
NO_CALLS = {
    "hermes": [
        "", "plain", "<tool_call>", "a <tool_call>{", f"<tool_call>{OSLO}", f"<tool_call>{OSLO}</tool_cal",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>', '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": tru}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "[" }</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\n"}}</tool_call>', "<tool_call>" + '{"a":' * 100,
    ],
    "llama3_json": [
        f"So: {OSLO}", '{"name": "other", "parameters": {}}', '{"city": "Oslo"}', "<|python_ta", "{}", " {", "[1]",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS][[", "[TOOL_CALLS]add[ARGS]", "[TOOL_CALLS]add[x]{}"],
    "pythonic": [
        "[", "[1] As was said", "[other()]", "[add(1)]", "[add(a=b)]", "[add(**{})]", "[add(a=1]", "[add(a=1e999)]",
        "[add(a='\n')]", "[add(a=1, a=2)]", "[add(a=" + "[" * 100 + ")]", "[add(a={1: 2})]", "[add(a=\\)]", "add(a=1)",
        "[add(a=" + "-" * 5000 + "1)]", "[add(a=9" + "9" * 5000 + ")]", '[add(a="\\ud800")]', "[add(a=" + "1," * 9000,
    ],
    "harmony": [
        "", "<|channel|>", "<|channel|>analysis<|message|>Hm.", "<|channel|>commentary to=functions.<|message|>{}",
        "<|channel|>commentary to=functions.add<|message|>", "<|channel|>commentary to=functions.add<|message|>{",
        "<|channel|>commentary to=functions.add<|message|>[1]", "<|channel|>to=functions." + "x" * 999 + "<|message|>",
    ],
    "qwen3_coder": [
        "<tool_call>", f"<tool_call>{OSLO}</tool_call>", "<tool_call><function=>", "<tool_call><function=a b",
        "<tool_call><function=add></function>", "<tool_call><function=add><parameter=a>1</function></tool_call>",
        "<tool_call><function=add><parameter=>1</parameter></function></tool_call>", "<function=other></function>",
        "<function=add>", "<function=add></function", "</tool_call>", "<function=x <tool_cal",
        "<tool_call><function=</tool_call>", "<tool_call><function=add><x></function></tool_call>",
        "<tool_call><function=" + "x" * 999 + "></function></tool_call>",
    ],
    "json_array": ["[", "[]", "{}", '[{"name": "add"', "x"],
}  # fmt: skip
KNOWN = [(family, text) for family, cases in EXAMPLES.items() for text, _ in cases]
KNOWN += [(family, text) for family, texts in NO_CALLS.items() for text in texts]


def parsed(family, pieces):
    parser = FAMILIES[family](TOOLS)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    joined = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(("family", "text", "parts"), [(name, *case) for name in EXAMPLES for case in EXAMPLES[name]])
def test_calls_of_each_family(family, text, parts):
    assert parsed(family, [text]) == parts
    assert parsed(family, text) == parts  # character by character
    assert all(json.loads(part.arguments) is not None for part in parts if isinstance(part, ToolCall))


@pytest.mark.parametrize(("family", "text"), [(name, text) for name in NO_CALLS for text in NO_CALLS[name]])
def test_what_is_no_call_is_text(family, text):
    assert parsed(family, [text]) == ([text] if text else [])
    assert parsed(family, text) == ([text] if text else [])


_SCRAPS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[", "]", ",", ";", OSLO, ARGUMENTS, "add(", "weather",
    "a=1", ")", "{", "}", '"', "'", "\\", " ", "\n", "<|python_tag|>", "<think>", "</think>", "<|start|>", "assistant",
    "<|channel|>", "analysis", "final", " to=functions.add", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "<function=add>", "</function>", "<parameter=a>", "</parameter>",
]  # fmt: skip
_scraps = st.lists(st.sampled_from(_SCRAPS) | st.text(max_size=4), max_size=12).map("".join)


@settings(max_examples=300)
@given(
    st.sampled_from(KNOWN) | st.tuples(st.sampled_from(sorted(FAMILIES)), _scraps),
    st.lists(st.integers(0, 10**6), max_size=12),
)
def test_where_a_text_is_cut_makes_no_difference(case, places):
    family, text = case
    assert parsed(family, cut(text, places)) == parsed(family, [text])


@pytest.mark.parametrize(
    ("family", "text"),
    [("hermes", "<tool_call>{"), ("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]["), ("hermes", "<")],
)
def test_text_is_given_back_as_soon_as_it_is_certain(family, text):
    """However often what begins as a call turns out to be none, little is held."""
    parser = FAMILIES[family](TOOLS)
    num_returned = 0
    for num_pushed in range(1, 2000):
        num_returned += sum(len(part) for part in parser.push(text))
        assert num_pushed * len(text) - num_returned <= 2 * len(text)


@pytest.mark.parametrize(
    ("family", "start"),
    [("hermes", '<tool_call>{"name": "'), ("qwen3_coder", "<tool_call><function=add><parameter=a>")],
)
def test_a_call_that_never_ends_is_held_up_to_a_bound(family, start):
    parser = FAMILIES[family](TOOLS)
    piece = "x" * 2**15
    parser.push(start)
    num_pieces = next(number for number in range(1, 100) if parser.push(piece))
    assert num_pieces <= MAX_CALL_CHARS // len(piece) + 1


def test_every_name_has_a_parser_and_another_is_refused():
    with pytest.raises(Exception, match="--tool-parser: there is no 'nonsense'; there are auto, none, harmony, hermes"):
        load_tool_parser("nonsense")


def test_a_package_adds_a_parser(monkeypatch):
    point = EntryPoint("mine", "router.replies.tools.json_array:JsonArrayParser", registry.GROUP)
    no_parser = EntryPoint("none_such", "router.replies.tools.base:ToolCall", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point, no_parser])
    assert load_tool_parser("mine") is JsonArrayParser
    with pytest.raises(ConfigError, match="not a subclass of ToolParser"):
        load_tool_parser("none_such")


@pytest.mark.parametrize(
    ("template", "tool_parser", "reasoning_parser"),
    [
        ("{{ messages }}", "none", "none"),
        ("<tool_call> {{ tools }} </think>", "hermes", "qwen3"),
        ("<tool_call> <function=", "none", "none"),
        ("<tool_call> <function=x> <parameter=y>", "qwen3_coder", "none"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("[TOOL_CALLS] [/THINK]", "mistral", "mistral"),
        ("<|python_tag|>", "llama3_json", "none"),
        ("<|python_start|>", "pythonic", "none"),
        ("<\uff5cAssistant\uff5c> </think>", "none", "deepseek_r1"),
    ],
)
def test_what_auto_chooses(template, tool_parser, reasoning_parser):
    assert registry.find_tool_parser("auto", template)[0] == tool_parser
    assert find_reasoning_style("auto", template)[0] == reasoning_parser


ASSISTANT, ANALYSIS = "<|start|>assistant", "<|channel|>analysis<|message|>"
STYLES = {name: find_reasoning_style(name, "")[1] for name in ("qwen3", "deepseek_r1", "mistral", "harmony")}
REASONED = [
    ("qwen3", "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes </think>", "", "Yes </think>"),
    ("qwen3", "", "No <think>Hm.</think>", "", "No <think>Hm.</think>"),
    ("qwen3", "", "<think>cut short", "cut short", ""),
    ("qwen3", "", "<thi", "", "<thi"),
    ("deepseek_r1", "<\uff5cAssistant\uff5c>", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", "<think>\n", "Hm. </thin", "Hm. </thin", ""),
    ("deepseek_r1", "", "<think>Hm.</think> a </think>", "Hm.", "a </think>"),
    ("deepseek_r1", "</think>", "Yes.", "", "Yes."),
    ("mistral", "[/INST]", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("harmony", ASSISTANT, f"{ANALYSIS}Hm.<|end|>{ASSISTANT}<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes."),
    (
        "harmony",
        ASSISTANT,
        f"{ANALYSIS}Hm.<|end|>{ASSISTANT}<|channel|>final <|constrain|>json<|message|>{{}}",
        "Hm.",
        "{}",
    ),
    (
        "harmony",
        ASSISTANT,
        f"{ANALYSIS}a{ANALYSIS}b{ASSISTANT}<|channel|>commentary<|message|>c<|end|><|channel|>final<|message|>d",
        "a\n\nb",
        "c\n\nd",
    ),
    ("harmony", ASSISTANT, f"{ANALYSIS}cut <|en", "cut <|en", ""),
    ("harmony", ASSISTANT, f"{ANALYSIS}Hm.<|end|>{ASSISTANT}<|chan", "Hm.", ""),
    ("harmony", ASSISTANT, "<|channel|>final<|message|>a < b <|x|>", "", "a < b <|x|>"),
    ("harmony", ASSISTANT, "Yes, to be sure.", "", "Yes, to be sure."),
    ("harmony", ASSISTANT, "<", "", "<"),
    ("harmony", ASSISTANT, "<|channel|>" + "x" * 600, "", "<|channel|>" + "x" * 600),
    ("harmony", f"{ASSISTANT}{ANALYSIS}So", " far.<|end|>", "far.", ""),
    ("harmony", f"{ASSISTANT}<|channel|>final<|message|>So", " far.<|return|>", "", " far."),
    ("harmony", "Once", " upon", "", " upon"),
]


def replies(parser, pieces, *, start=0, ended=True):
    """What a parser of replies makes of one token per piece; `start`: characters before."""
    parts = []
    for number, piece in enumerate(pieces):
        reason = FinishReason.STOP if ended and number == len(pieces) - 1 else None
        parts += parser.take(TextDelta(piece, number, [7], [], [start], reason))
        start += len(piece)
    return parts


def reply_parser(style=None, prompt_end="", family=None, **options):
    splitter = None if style is None else STYLES[style].splitter(prompt_end)
    tools = None if family is None else FAMILIES[family](TOOLS)
    return ReplyParser(tools, splitter, ReplyOptions(TOOLS, **options), ToolParser.call_id, b"seed")


def text_of(parts, kind):
    return "".join(part.text for part in parts if isinstance(part, kind))


@pytest.mark.parametrize(("style", "prompt_end", "text", "reasoning", "rest"), REASONED)
@pytest.mark.parametrize("as_pieces", [lambda text: [text], list])
def test_reasoning_of_each_family(style, prompt_end, text, reasoning, rest, as_pieces):
    parts = replies(reply_parser(style, prompt_end), as_pieces(text))
    assert (text_of(parts, Reasoning), text_of(parts, Text)) == (reasoning, rest)


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(STYLES)),
    st.sampled_from(["", "<think>\n", "</think>", ASSISTANT, ANALYSIS]),
    _scraps,
    st.data(),
)
@example("qwen3", "", "<think> </think> x", None)
@example("harmony", ASSISTANT, "<|channel|>final<|end|>x<|message|>y<|start|>", None)
def test_where_a_reply_is_cut_makes_no_difference(style, prompt_end, text, data):
    places = data.draw(st.lists(st.integers(0, 10**6), max_size=12)) if data else range(len(text))
    cuts = [text], cut(text, places)
    family = "harmony" if style == "harmony" else "hermes"
    parsers = [reply_parser(style, prompt_end, family) for _ in cuts]
    whole, cut_up = (replies(parser, pieces) for parser, pieces in zip(parsers, cuts, strict=True))
    for kind in (Reasoning, Text):
        assert text_of(cut_up, kind) == text_of(whole, kind)
    assert [part for part in cut_up if isinstance(part, Call)] == [part for part in whole if isinstance(part, Call)]


@pytest.mark.parametrize("as_pieces", [lambda text: [text], list])
@pytest.mark.parametrize(
    "call",
    [
        f"{ASSISTANT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        f"{ASSISTANT} to=functions.weather<|channel|>commentary json<|message|>",
    ],
)
def test_messages_of_harmony(call, as_pieces):
    head = f"{ANALYSIS}Hm.<|end|>{ASSISTANT}<|channel|>commentary<|message|>I look.<|end|>"
    again = f"{call}{ARGUMENTS}<|call|>{ASSISTANT}{ANALYSIS}Again."
    text = f"{head}{again}<|end|>{call}{ARGUMENTS}"
    parser = reply_parser("harmony", ASSISTANT, "harmony")
    parts = replies(parser, as_pieces(text))
    calls = [part for part in parts if isinstance(part, Call)]
    assert (text_of(parts, Reasoning), text_of(parts, Text)) == ("Hm.\n\nAgain.", "I look.")
    assert [(call.number, call.name, call.arguments) for call in calls] == [(0, *CALL), (1, *CALL)]
    if as_pieces is list:
        of_reasoning = [f"{ANALYSIS}Hm.<|end|>", f"{ASSISTANT}{ANALYSIS}Again.<|end|>"]
        assert parser.num_reasoning_tokens == sum(map(len, of_reasoning))
    left = replies(reply_parser("harmony", ASSISTANT), as_pieces(text))
    assert text_of(left, Text).count(ARGUMENTS) == 2  # without tools it is text


@pytest.mark.parametrize(
    ("reason", "text"),
    [(FinishReason.LENGTH, ""), (FinishReason.ABORT, ""), (FinishReason.STOP, ', {"name": "add", "arg')],
)
def test_a_forced_call_that_is_cut_off_is_no_text(reason, text):
    """Unless a stop text cut it off, which the client asked for."""
    parser = reply_parser(family="json_array", must_call=True)
    parts = parser.take(TextDelta(f'[{OSLO}, {{"name": "add", "arg', 0, [7], [], [0], reason))
    assert [part.name for part in parts if isinstance(part, Call)] == ["weather"]
    assert text_of(parts, Text) == text


def test_reasoning_then_text_then_calls():
    text = f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>{OSLO}</tool_call>\n<tool_call>{OSLO}</tool_call>\n"
    parser = reply_parser("qwen3", "", "hermes")
    parts = replies(parser, list(text))
    calls = [part for part in parts if isinstance(part, Call)]
    assert (text_of(parts, Reasoning), text_of(parts, Text)) == ("Hm.", "I look.")
    assert [(call.number, call.name, call.arguments) for call in calls] == [(0, *CALL), (1, *CALL)]
    assert len({call.call_id for call in calls}) == 2
    assert parser.num_reasoning_tokens == len("<think>\nHm.\n</think>")
    assert parser.finish_label(FinishReason.STOP) == "tool_calls"
    assert parser.finish_label(FinishReason.LENGTH) == "length"


@pytest.mark.parametrize("num_replayed", range(0, 120, 7))
async def test_a_resumed_reply_goes_on_where_it_was(num_replayed):
    text = f"<think>Hm. Hm.</think>\n\nI look.\n<tool_call>{OSLO}</tool_call> <tool_call>{OSLO}</tool_call>\n"
    whole, first, second = (reply_parser("qwen3", "", "hermes") for _ in range(3))
    expected = replies(whole, list(text))
    parts = replies(first, text[:num_replayed], ended=False)
    await second.replay(text[:num_replayed], range(num_replayed), Tenant())
    parts += replies(second, text[num_replayed:], start=num_replayed)
    assert parts == expected
    assert second.num_reasoning_tokens == whole.num_reasoning_tokens


async def test_a_long_reply_is_resumed_bit_by_bit():
    text = f"{ANALYSIS}Hm.<|end|>{ASSISTANT}" * 3000
    whole, resumed = reply_parser("harmony", ASSISTANT), reply_parser("harmony", ASSISTANT)
    replies(whole, list(text), ended=False)
    with LineCounter(harmony, splits) as work:
        most_lines, _ = await work.most_in_a_turn(resumed.replay(text, range(len(text)), Tenant()))
    assert resumed.num_reasoning_tokens == whole.num_reasoning_tokens > 0
    assert work.num_lines < 20 * len(text)
    assert most_lines < 100_000


@pytest.mark.parametrize("style", ["qwen3", "deepseek_r1", "harmony"])
@pytest.mark.parametrize("beginning", ["", "<think>", f"{ANALYSIS}"])
def test_tokens_without_text_take_as_long_whatever_their_number(style, beginning):
    """Such as special ones that a logit bias has the model repeat."""
    parser, at = reply_parser(style, ASSISTANT), len(beginning)
    parser.take(TextDelta(beginning, 0, [7], [], [0], None))
    num_lines = []
    for _ in range(2):
        with LineCounter(splits, reasoning, harmony) as work:
            for _ in range(1000):
                parser.take(TextDelta("", 0, [7], [], [at], None))
        num_lines.append(work.num_lines)
    assert num_lines[1] < 1.5 * num_lines[0]


def test_schemas_of_any_size_take_bounded_work_with_each_call():
    work = []
    for size in (1_000, 10_000):
        schemas = [
            {"anyOf": [{}] * size},
            {"type": ["string"] * size},
            {"allOf": [{"oneOf": [{}] * 100}] * (size // 100)},
        ]
        parser = FAMILIES["qwen3_coder"]({"f": {"properties": {f"p{at}": each for at, each in enumerate(schemas)}}})
        with LineCounter(qwen3_coder) as counted:
            (call,) = parser.push(
                "<function=f>" + "".join(f"<parameter=p{at}>1</parameter>" for at in range(3)) + "</function>"
            )
        assert json.loads(call.arguments) == {"p0": "1", "p1": "1", "p2": "1"}
        work.append(counted.num_lines)
    assert work[0] == work[1]
