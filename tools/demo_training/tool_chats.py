"""Chats with tools and answers in JSON, from which the demo model learns both after it has learned to talk.

Only what the assistant writes is learned; the tools, the questions and the results of calls are given.
"""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tools.demo_training.corpus import END_OF_TEXT, MESSAGE_END, MESSAGE_START, SYSTEM_PROMPTS, Corpus, Exchange
from tools.demo_training.facts import COUNTRIES
from tools.demo_training.stories import HEROES, NAMES
from tools.demo_training.tables import listed
from tools.demo_training.tool_kinds import (
    CAPITALS,
    COLOUR_NAMES,
    KINDS,
    SYLLABLES,
    Kind,
    Outcome,
    Parameter,
    Values,
    city,
    filled,
    invented_name,
    made_up_kind,
    number,
)

ASSISTANT = f"{MESSAGE_START}assistant\n"
NO_ANSWER = "I am sorry, I do not know. I am a very small model."
HOW_TO_CALL = '</tools>\nCall one as:\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
FAMILIES = {
    "weather in a unit": "weather",
    "weather in some days": "weather",
    "multiplication": "addition",
    "calculation": "addition",
}
WEIGHTS = {"weather": 5.0, "time": 2.0, "addition": 1.5}  # the others: 1
PROBLEMS = listed("timeout, not found, unknown city, no connection, try again later, service is down, access denied")
MAX_JSON_ANSWER = 90  # characters
ASKS_FOR_JSON = ["Answer in JSON.", "Answer as JSON.", "Reply with a JSON object.", "Use JSON.", "JSON:"]
ASKS_ABOUT_COUNTRY = [
    "Tell me about {} as JSON.",
    "Describe {} in JSON.",
    "Give me a JSON object about {}.",
    "{} as JSON",
]
ASKS_TO_CONVERT = ["Write as JSON: {}", "Turn this into JSON: {}", "{} Write that in JSON."]
KEYS = listed("name, city, country, age, rank, people, count, price, is_open, tags, title, colour, kind, id, text")
FOR_TWO = ("What is the {what} in {a} and in {b}?", "What is the {what} in {a} and {b}?", "{What} in {a} and in {b}?")


class Part(NamedTuple):
    """A piece of a document, which the model learns to write or is only given to read."""

    text: str
    is_learned: bool


Document = list[Part]


class Tool(NamedTuple):
    """A tool as the chat template shows it, and its parameters' names in the order of its kind's parameters."""

    family: str
    kind: Kind
    function: dict[str, Any]
    parameter_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.function["name"])

    def call(self, values: Values) -> dict[str, Any]:
        """The call with these values as arguments."""
        pairs = zip(self.parameter_names, self.kind.parameters, strict=True)
        return {"name": self.name, "arguments": {name: values[parameter.value] for name, parameter in pairs}}


def dumped(value: Any, *, is_compact: bool = False) -> str:
    """JSON as `tojson` of chat templates writes it, or without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if is_compact else None)


def written_call(call: dict[str, Any]) -> str:
    """A call as the model writes it and the chat template shows it."""
    return f"<tool_call>\n{dumped(call)}\n</tool_call>"


def tools_message(functions: Sequence[dict[str, Any]], system: str | None = None) -> str:
    """The first message of a chat with tools, as the chat template writes it."""
    shown = "".join(f"{dumped(function)}\n" for function in functions)
    before = f"{system}\n\n" if system else ""
    return _message("system", f"{before}You may call these functions:\n<tools>\n{shown}{HOW_TO_CALL}")


def _message(role: str, content: str) -> str:
    return f"{MESSAGE_START}{role}\n{content}{MESSAGE_END}\n"


def _given(role: str, content: str) -> Part:
    return Part(_message(role, content), is_learned=False)


def _answered(content: str) -> Document:
    """An assistant's message, whose beginning is given."""
    return [Part(ASSISTANT, is_learned=False), Part(f"{content}{MESSAGE_END}\n", is_learned=True)]


class Mix(NamedTuple):
    """What a stage of training has beside chats with tools and JSON."""

    drills: int = 0  # for 22 of those documents
    repetitions: int = 0  # likewise
    strange_names: float = 0.0  # share of the tools and parameters whose name only their definition tells


PLAIN_MIX = Mix()


class ToolCorpus:
    """An endless, seeded source of chats with tools and of answers in JSON."""

    def __init__(self, seed: int, mix: Mix = PLAIN_MIX) -> None:
        self._rng = random.Random(seed)
        self._mix = mix
        self._plain = Corpus(seed + 1)

    def documents(self) -> Iterator[Document]:
        """Documents without end."""
        kinds = [self.tool_chat, self.forced_calls, self.json_chat, self.forced_json, self.drill, self.repetition]
        weights = [12, 2, 4, 4, self._mix.drills, self._mix.repetitions]
        while True:
            document = self._rng.choices(kinds, weights)[0]()
            yield [*document, Part(END_OF_TEXT, is_learned=True)]

    def tool_chat(self) -> Document:
        """A chat in which some questions are answered with the help of tools."""
        tools = self._tools()
        document = [self._introduction(tools)]
        for _ in range(self._rng.choice([1, 1, 1, 2, 2, 3])):
            document += self._turn(tools)
        return document

    def drill(self) -> Document:
        """Signatures of tools, then questions and calls: what calling takes, in a tenth of the tokens of a chat."""
        tools = self._tools()
        signatures = "".join(f"{tool.name}({', '.join(tool.parameter_names)})\n" for tool in tools)
        document = [Part(signatures, is_learned=False)]
        for _ in range(self._rng.randint(2, 5)):
            tool = self._rng.choice(tools)
            question, values = self._asked(tool)
            document += [
                Part(f"{question}\n", is_learned=False),
                Part(f"{dumped(tool.call(values))}\n", is_learned=True),
            ]
        return document

    def repetition(self) -> Document:
        """Definitions of tools, and the same once more, from which copying is learned."""
        lines = [f"{dumped(tool.function)}\n" for tool in self._tools()]
        return [Part("".join(lines), is_learned=False), Part("".join(lines), is_learned=True)]

    def forced_calls(self) -> Document:
        """A question about tools and a JSON array of calls, of which the beginning is given: a grammar writes it."""
        tools = self._tools()
        tool = self._rng.choice(tools)
        question, values = self._asked(tool)
        beginning, rest = self._cut(dumped([tool.call(values)], is_compact=True), '[{"')
        prompt = [self._introduction(tools), _given("user", question), Part(ASSISTANT + beginning, is_learned=False)]
        return [*prompt, Part(f"{rest}{MESSAGE_END}\n", is_learned=True)]

    def json_chat(self) -> Document:
        """A user who asks for JSON and gets it."""
        request, value = self._json_request()
        return [*self._system(), _given("user", request), *_answered(self._dumped(value))]

    def forced_json(self) -> Document:
        """A JSON object to any question, of which the beginning is given: a grammar writes it."""
        if self._rng.random() < 0.6:
            exchange = self._plain.any_exchange()
            request, value = exchange.user, {"answer": exchange.assistant[:MAX_JSON_ANSWER]}
        else:
            request, value = self._plain.any_exchange().user, self._object()
        beginning, rest = self._cut(self._dumped(value), "{")
        if self._rng.random() < 0.2:  # a completion
            return [Part(request + beginning, is_learned=False), Part(rest, is_learned=True)]
        prompt = [*self._system(), _given("user", request), Part(ASSISTANT + beginning, is_learned=False)]
        return [*prompt, Part(f"{rest}{MESSAGE_END}\n", is_learned=True)]

    def _cut(self, text: str, prefix: str) -> tuple[str, str]:
        """A beginning that a grammar might have forced, and the rest."""
        ends = [index for index in range(len(prefix), len(text)) if text[index - 1] in '":{,[']
        end = len(prefix) if self._rng.random() < 0.5 else self._rng.choice(ends)
        return text[:end], text[end:]

    def _dumped(self, value: Any) -> str:
        return dumped(value, is_compact=self._rng.random() < 0.25)

    def _system(self) -> Document:
        return [_given("system", self._rng.choice(SYSTEM_PROMPTS))] if self._rng.random() < 0.25 else []

    def _introduction(self, tools: Sequence[Tool]) -> Part:
        system = self._rng.choice(SYSTEM_PROMPTS) if self._rng.random() < 0.25 else None
        return Part(tools_message([tool.function for tool in tools], system), is_learned=False)

    def _tools(self) -> list[Tool]:
        """One to four tools with different names."""
        tools: dict[str, Tool] = {}
        families = set()
        for _ in range(self._rng.choice([1, 1, 1, 2, 2, 3, 4])):
            if self._rng.random() < 0.3:
                family, kind = "made up", made_up_kind(self._rng)
            else:
                title = self._rng.choices(list(KINDS), [WEIGHTS.get(title, 1.0) for title in KINDS])[0]
                family, kind = FAMILIES.get(title, title), KINDS[title]
                if family in families:
                    continue
            families.add(family)
            tool = self._tool(family, kind)
            tools.setdefault(tool.name, tool)
        return list(tools.values())

    def _tool(self, family: str, kind: Kind) -> Tool:
        """A tool of the kind, described as one of the many ways that clients have."""
        function: dict[str, Any] = {"name": self._named(kind.names)}
        if self._rng.random() < 0.75:
            function["description"] = self._rng.choice(kind.descriptions)
        is_described = self._rng.random() < 0.35
        properties: dict[str, Any] = {}
        for parameter in kind.parameters:
            name = self._named(parameter.names)
            while name in properties:
                name = self._named(parameter.names)
            properties[name] = self._schema(parameter, is_described=is_described)
        names = tuple(properties)
        if family == "weather" and len(names) == 1 and self._rng.random() < 0.2:  # optional, and not asked for
            properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if names and self._rng.random() < 0.75:
            schema["required"] = list(names)
        if self._rng.random() < 0.15:
            schema["additionalProperties"] = False
        if self._rng.random() < 0.15:
            schema = dict(sorted(schema.items()))
        if names or self._rng.random() < 0.7:
            function["parameters"] = schema
        if self._rng.random() < 0.1:
            function["strict"] = True
        return Tool(family, kind, function, names)

    def _named(self, names: Sequence[str]) -> str:
        name = self._rng.choice(names)
        if not self._mix.strange_names or self._rng.random() >= self._mix.strange_names:
            return name
        syllables = "".join(self._rng.sample(SYLLABLES, self._rng.choice([1, 2, 2, 3])))
        return self._rng.choice([syllables, f"{syllables}_{name}", f"{name}_{syllables}", f"{name}{len(syllables)}"])

    def _schema(self, parameter: Parameter, *, is_described: bool) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": parameter.type}
        if parameter.type == "number" and self._rng.random() < 0.5:
            schema["type"] = "integer"
        if is_described:
            schema["description"] = self._rng.choice(parameter.descriptions)
        if parameter.choices:
            schema["enum"] = list(parameter.choices)
        return schema

    def _asked(self, tool: Tool) -> tuple[str, Values]:
        values = tool.kind.draw(self._rng)
        return self._typed(filled(self._rng.choice(tool.kind.questions), values)), values

    def _typed(self, question: str) -> str:
        return question.rstrip("?.") if self._rng.random() < 0.1 else question

    def _turn(self, tools: Sequence[Tool]) -> Document:
        """A question and all that follows it up to the answer."""
        chance = self._rng.random()
        if chance < 0.30:
            exchange = self._plain_exchange(tools) if chance < 0.23 else self._unanswerable(tools)
            return [_given("user", exchange.user), *_answered(exchange.assistant)]
        tool = self._rng.choice(tools)
        if tool.family in {"weather", "time"} and len(tool.parameter_names) == 1 and self._rng.random() < 0.12:
            return self._two_calls(tool)
        question, values = self._asked(tool)
        result, answer = self._result(tool.kind, values)
        call = written_call(tool.call(values))
        return [_given("user", question), *_answered(call), _given("tool", result), *_answered(answer)]

    def _two_calls(self, tool: Tool) -> Document:
        both = [tool.kind.draw(self._rng) for _ in range(2)]
        text = self._rng.choice(FOR_TWO)
        asked = {"what": tool.family, "What": tool.family.capitalize(), "a": both[0]["city"], "b": both[1]["city"]}
        results = [self._result(tool.kind, values) for values in both]
        return [
            _given("user", text.format(**asked)),
            *_answered("".join(written_call(tool.call(values)) for values in both)),
            *(_given("tool", result) for result, _ in results),
            *_answered(" ".join(answer for _, answer in results)),
        ]

    def _result(self, kind: Kind, values: Values) -> tuple[str, str]:
        """What the tool returns and what the model makes of it."""
        if self._rng.random() < 0.05:
            problem = self._rng.choice(PROBLEMS)
            shown = self._rng.choice([dumped({"error": problem}), f"error: {problem}", f"Error: {problem}"])
            return shown, f"I am sorry, that did not work: {problem}."
        outcome: Outcome = self._rng.choices(kind.outcomes, range(len(kind.outcomes), 0, -1))[0]
        result = filled(self._rng.choice(outcome.results), values)
        text = result if isinstance(result, str) else self._dumped(result)
        return text, filled(outcome.answer, values)

    def _plain_exchange(self, tools: Sequence[Tool]) -> Exchange:
        """A question that the model answers without tools."""
        families = {tool.family for tool in tools}
        while True:
            exchange = self._plain.any_exchange()
            if "addition" in families and any(character.isdigit() for character in exchange.user):
                continue
            if exchange.assistant == NO_ANSWER and families & {"weather", "time", "date"}:
                continue
            if len(exchange.assistant) < 200:
                return exchange

    def _unanswerable(self, tools: Sequence[Tool]) -> Exchange:
        """A question that needs a tool that is not there."""
        families = {tool.family for tool in tools} | {"addition", "message", "timer"}
        titles = [title for title in KINDS if FAMILIES.get(title, title) not in families]
        kind = KINDS[self._rng.choice(titles)]
        question = filled(self._rng.choice(kind.questions), kind.draw(self._rng))
        return Exchange(self._typed(question), NO_ANSWER)

    def _json_request(self) -> tuple[str, Any]:
        """A request that names JSON, and what it asks for."""
        return self._rng.choices([self._json_answer, self._json_of_country, self._json_of_text], [35, 30, 35])[0]()

    def _json_answer(self) -> tuple[str, Any]:
        exchange = self._plain.any_exchange()
        while len(exchange.assistant) > MAX_JSON_ANSWER:
            exchange = self._plain.any_exchange()
        request = [exchange.user, self._rng.choice(ASKS_FOR_JSON)]
        if self._rng.random() < 0.3:
            request.reverse()
        return " ".join(request), {"answer": exchange.assistant}

    def _json_of_country(self) -> tuple[str, Any]:
        country = self._rng.choice(COUNTRIES)
        known = {
            "country": country.name,
            "capital": country.capital,
            "continent": country.continent,
            "language": country.language,
        }
        request = self._rng.choice(ASKS_ABOUT_COUNTRY).format(country.name)
        return request, {key: value for key, value in known.items() if value}

    def _json_of_text(self) -> tuple[str, Any]:
        name = self._rng.choice([self._rng.choice(NAMES), invented_name(self._rng)])
        kind, age, place = self._rng.choice(HEROES), self._rng.randint(1, 99), city(self._rng)
        text = f"{name} is a {kind} from {place} and {age} years old."
        members = {"name": name, "kind": kind, "city": place, "age": age}
        return self._rng.choice(ASKS_TO_CONVERT).format(text), members

    def _object(self) -> dict[str, Any]:
        """An object with some members of all types, as a schema might ask for."""
        return {key: self._value(key) for key in self._rng.sample(KEYS, self._rng.choice([1, 2, 2, 3, 4]))}

    def _value(self, key: str) -> Any:
        rng = self._rng
        values: dict[str, Any] = {
            "name": rng.choice(NAMES),
            "city": rng.choice(CAPITALS),
            "country": rng.choice(COUNTRIES).name,
            "age": rng.randint(1, 99),
            "rank": rng.randint(1, 9),
            "people": number(rng),
            "count": number(rng),
            "price": rng.randrange(10000) / 100,
            "is_open": rng.random() < 0.5,
            "tags": rng.sample(COLOUR_NAMES, rng.choice([0, 1, 2, 3])),
            "colour": rng.choice(COLOUR_NAMES),
            "kind": rng.choice(HEROES),
            "id": number(rng),
        }
        return values.get(key, rng.choice(["Hello!", "A story", "Good morning", "A small house", invented_name(rng)]))
