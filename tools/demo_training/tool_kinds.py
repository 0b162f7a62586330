"""Kinds of tools that the demo model learns to call, and what people ask of them, as tables.

In the tables, `|` separates choices and `{name}` is a value that is drawn for each use.
"""

import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tools.demo_training.facts import ANIMALS, COLOURS, COUNTRIES, capitalized
from tools.demo_training.stories import HEROES, NAMES
from tools.demo_training.tables import listed, rows

Values = dict[str, Any]  # of a use: name -> text or number


class Parameter(NamedTuple):
    """A parameter of a tool; its argument is the value of the use that is called `value`."""

    names: tuple[str, ...]
    type: str
    value: str
    descriptions: tuple[str, ...]
    choices: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """A result of a call, as one of several texts or objects that say the same, and the model's answer to it."""

    results: tuple[Any, ...]
    answer: str


class Kind(NamedTuple):
    """Tools that do the same under different names. A question has the values that the arguments need."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    draw: Callable[[random.Random], Values]


def choices(text: str) -> tuple[str, ...]:
    """Splits a table's cell at its bars."""
    return tuple(choice.strip() for choice in text.split("|"))


CAPITALS = [country.capital for country in COUNTRIES]
OTHER_CITIES = listed(
    "New York, San Francisco, Los Angeles, Chicago, Boston, Seattle, Toronto, Vancouver, Munich, Hamburg, Cologne, "
    "Frankfurt, Milan, Naples, Venice, Barcelona, Seville, Lyon, Nice, Marseille, Geneva, Manchester, Edinburgh, "
    "Sydney, Melbourne, Mumbai, Shanghai, Hong Kong, Osaka, Kyoto, Dubai, Istanbul, Singapore, Bergen, Porto"
)
SKIES = listed("sunny, cloudy, rainy, windy, foggy, snowy, clear, stormy, warm, cold, hot, dry, wet, icy, mild, humid")
SYLLABLES = listed("ba, be, bo, da, do, fa, fe, go, ka, ko, la, li, lo, ma, mi, mo, na, ne, ra, ri, ro, sa, ta, to, va")
ENDINGS = listed("burg, ville, ton, ford, stad, port, dale, field, bridge, wick, n, s, ra, nia")
ANIMAL_NAMES = [row[0] for row in rows(ANIMALS)]
COLOUR_NAMES = sorted({row[1] for row in rows(COLOURS)})
THINGS = ANIMAL_NAMES + HEROES + listed("trains, bread, music, books, rockets, stars, rivers, planets, soup, football")
VERBS = listed(
    "find, open, close, delete, create, show, start, stop, play, order, buy, lock, clean, check, read, print, save"
)
NOUNS = listed(
    "door, song, book, file, room, lamp, window, ticket, report, film, recipe, garden, meeting, project, user, server, "
    "box, car, table, account, photo, letter, task, game, device"
)
TEXTS = listed(
    "hello, good morning, dinner is ready, see you soon, happy birthday, call me, I am late, the train is late, "
    "thank you, where are you, we won, good night, the soup is hot, come home, I like your book, well done"
)


def invented_name(rng: random.Random) -> str:
    """A name that is in no table, so that arguments have to be copied."""
    return ("".join(rng.sample(SYLLABLES, rng.choice([1, 2]))) + rng.choice(ENDINGS)).capitalize()


def city(rng: random.Random) -> str:
    """A city: mostly a capital."""
    chance = rng.random()
    if chance < 0.65:
        return rng.choice(CAPITALS)
    return rng.choice(OTHER_CITIES) if chance < 0.85 else invented_name(rng)


def number(rng: random.Random) -> int:
    """A whole number of one to five digits."""
    return rng.randrange(10 ** rng.choice([1, 2, 2, 3, 4, 5]))


def clock(rng: random.Random) -> str:
    """A time of day."""
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def _weather(rng: random.Random) -> Values:
    degrees: float = rng.randint(-15, 40)
    if rng.random() < 0.1:
        degrees += 0.5
    return {
        "city": city(rng),
        "degrees": degrees,
        "sky": rng.choice(SKIES),
        "unit": rng.choice(["celsius", "fahrenheit"]),
        "percent": rng.randint(5, 99),
        "days": rng.randint(2, 9),
    }


def _time(rng: random.Random) -> Values:
    zone = rng.choice(listed("CET, UTC, EST, PST, JST, GMT, local"))
    date = f"20{rng.randint(24, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return {"city": city(rng), "time": clock(rng), "zone": zone, "date": date}


def _sum(rng: random.Random) -> Values:
    a, b = number(rng), number(rng)
    return {"a": a, "b": b, "sum": a + b, "difference": a - b, "product": a * b}


def _expression(rng: random.Random) -> Values:
    a, b, c = (rng.randrange(1, 10 ** rng.choice([1, 2, 3])) for _ in range(3))
    texts = [(f"{a} * {b}", a * b), (f"{a} + {b} * {c}", a + b * c), (f"{a} - {b}", a - b), (f"{a} + {b}", a + b)]
    text, value = rng.choice([*texts, (f"({a} + {b}) * {c}", (a + b) * c)])
    return {"text": text, "value": value}


def _message(rng: random.Random) -> Values:
    name = invented_name(rng) if rng.random() < 0.15 else rng.choice(NAMES)
    return {"name": name, "text": rng.choice(TEXTS)}


def _country(rng: random.Random) -> Values:
    people = rng.choice([rng.randrange(1, 99) * 10**6, rng.randrange(10**5, 10**8)])
    return {"country": rng.choice(COUNTRIES).name, "people": people}


def _search(rng: random.Random) -> Values:
    topic = rng.choice([rng.choice(THINGS), f"{rng.choice(COLOUR_NAMES)} {rng.choice(THINGS)}", city(rng)])
    found = rng.choice([rng.choice(TEXTS), f"{rng.choice(THINGS)} and {rng.choice(THINGS)}", invented_name(rng)])
    return {"topic": topic, "found": capitalized(found)}


def _stock(rng: random.Random) -> Values:
    symbol = "".join(rng.sample("ABCDEFGHIKLMNOPRSTUVWXYZ", rng.choice([3, 4])))
    return {"symbol": symbol, "price": rng.randrange(100, 99999) / 100}


def _order(rng: random.Random) -> Values:
    state = rng.choice(listed("shipped, on the way, delivered, lost, paid, cancelled, ready, late"))
    return {"order": rng.randrange(100, 99999), "state": state}


def _counted(rng: random.Random) -> Values:
    return {"count": rng.randint(1, 90), "sides": rng.choice([4, 6, 8, 10, 12, 20, 100]), "thrown": rng.randint(1, 12)}


_CITY = Parameter(
    choices("city|city|city|city|location|place|town"),
    "string",
    "city",
    choices("The city|The name of the city|Name of a city|The city, e.g. Paris|City name|The place to look up"),
)
_UNIT = Parameter(("unit",), "string", "unit", ("The unit of the temperature",), ("celsius", "fahrenheit"))
_DAYS = Parameter(choices("days|days|day"), "integer", "days", choices("In how many days|The number of days"))
_NUMBERS = (
    Parameter(choices("a|a|x|first|left"), "number", "a", ("The first number",)),
    Parameter(choices("b|b|y|second|right"), "number", "b", ("The second number",)),
)

KINDS = {
    "weather": Kind(
        choices("get_weather|get_weather|get_weather|weather|get_current_weather|current_weather|fetch_weather"),
        choices(
            "Get the current weather in a city|Returns the weather of a city.|Get the weather|Get weather for a city|"
            "The current weather of a place|Tells the weather.|Get the current weather in a given location"
        ),
        (_CITY,),
        choices(
            "What is the weather in {city}?|What is the weather in {city}?|What's the weather in {city}?|"
            "What is the weather like in {city}?|What's the weather like in {city}?|How is the weather in {city}?|"
            "How is the weather in {city} today?|What is the weather in {city} today?|Is it raining in {city}?|"
            "Is it cold in {city}?|Is it sunny in {city} now?|Weather in {city}?|Tell me the weather in {city}.|"
            "Do I need an umbrella in {city}?|How warm is it in {city}?|What is the temperature in {city}?|"
            "Please check the weather in {city}.|What is the weather in {city} right now?"
        ),
        (
            Outcome(
                (
                    {"temperature": "degrees", "condition": "sky"},
                    {"temperature": "degrees", "condition": "sky"},
                    {"city": "city", "temperature": "degrees", "condition": "sky"},
                    {"condition": "sky", "temperature": "degrees"},
                    {"temperature": "degrees", "unit": "unit", "condition": "sky"},
                    {"temperature_c": "degrees", "sky": "sky"},
                    {"location": "city", "weather": "sky", "temperature": "degrees", "humidity": "percent"},
                    "{sky}, {degrees} degrees",
                    "{Sky}, {degrees} degrees.",
                    "{sky}, {degrees} °C",
                    "{sky}, {degrees}°C",
                    "{degrees} degrees and {sky}",
                    "{degrees} degrees, {sky}",
                    "It is {sky} and {degrees} degrees in {city}.",
                ),
                "It is {sky} in {city}, with {degrees} degrees.",
            ),
            Outcome(
                ("{sky}", "{Sky}", "{Sky}.", {"weather": "sky"}, {"condition": "sky"}, "It is {sky} in {city}."),
                "It is {sky} in {city}.",
            ),
            Outcome(
                ({"temperature": "degrees"}, {"degrees": "degrees"}, "{degrees} degrees", "{degrees} °C", "{degrees}"),
                "It is {degrees} degrees in {city}.",
            ),
        ),
        _weather,
    ),
    "weather in a unit": Kind(
        choices("get_weather|get_current_weather|get_temperature|weather"),
        choices("Get the current weather in a given location|Get the temperature of a city"),
        (_CITY, _UNIT),
        choices(
            "What is the weather in {city} in {unit}?|What is the temperature in {city} in {unit}?|"
            "How warm is it in {city}, in {unit}?"
        ),
        (
            Outcome(
                ({"temperature": "degrees", "unit": "unit"}, "{degrees} degrees {unit}", "{degrees}"),
                "It is {degrees} degrees {unit} in {city}.",
            ),
        ),
        _weather,
    ),
    "weather in some days": Kind(
        choices("get_forecast|forecast|get_weather|weather"),
        choices("Get the weather of the next days|Returns the forecast for a city.|Returns the weather of a city."),
        (_CITY, _DAYS),
        choices(
            "What is the weather in {city} in {days} days?|What will the weather be in {city} in {days} days?|"
            "What is the forecast for {city} for {days} days?|What is the weather in {city} for the next {days} days?"
        ),
        (Outcome(("{sky}", {"forecast": "sky"}, {"weather": "sky"}), "It will be {sky} in {city}."),),
        _weather,
    ),
    "time": Kind(
        choices("get_time|get_time|get_current_time|current_time|time_in|clock"),
        choices("Get the current time in a city|Returns the local time.|Tells the time in a city.|Get the time"),
        (_CITY,),
        choices(
            "What time is it in {city}?|What is the time in {city}?|What's the time in {city}?|"
            "Tell me the time in {city}.|How late is it in {city}?|What time is it now in {city}?"
        ),
        (
            Outcome(
                ("{time}", {"time": "time"}, {"city": "city", "time": "time"}, {"time": "time", "timezone": "zone"}),
                "It is {time} in {city}.",
            ),
        ),
        _time,
    ),
    "date": Kind(
        choices("get_date|today|get_current_date|current_date"),
        choices("Get the date of today|Returns today's date."),
        (),
        choices("What is the date today?|What is today's date?|What day is it today?|Which date is it?"),
        (Outcome(("{date}", {"date": "date"}, {"today": "date"}), "Today is {date}."),),
        _time,
    ),
    "addition": Kind(
        choices("add|add|add_numbers|sum|plus"),
        choices("Add two numbers|Adds two numbers.|Returns the sum of two numbers."),
        _NUMBERS,
        choices("What is {a} + {b}?|What is {a} plus {b}?|Add {a} and {b}.|How much is {a} plus {b}?|{a} + {b} = ?"),
        (Outcome(("{sum}", {"result": "sum"}, {"sum": "sum"}), "{a} + {b} = {sum}."),),
        _sum,
    ),
    "multiplication": Kind(
        choices("multiply|multiply|multiply_numbers|product|times"),
        choices("Multiply two numbers|Multiplies two numbers.|Returns the product of two numbers."),
        _NUMBERS,
        choices("What is {a} * {b}?|What is {a} times {b}?|Multiply {a} and {b}.|Multiply {a} by {b}."),
        (Outcome(("{product}", {"result": "product"}, {"product": "product"}), "{a} * {b} = {product}."),),
        _sum,
    ),
    "calculation": Kind(
        choices("calculate|calculator|evaluate|compute"),
        choices("Calculate an expression|Evaluates arithmetic.|Computes the value of an expression."),
        (Parameter(choices("expression|expression|text|formula"), "string", "text", ("What to calculate",)),),
        choices("What is {text}?|Calculate {text}.|Compute {text}.|How much is {text}?"),
        (Outcome(("{value}", {"result": "value"}, {"value": "value"}), "{text} = {value}."),),
        _expression,
    ),
    "message": Kind(
        choices("send_message|send_message|message|send_text|send_email"),
        choices("Send a message to a person|Sends a message."),
        (
            Parameter(choices("to|to|name|recipient|person"), "string", "name", ("Who gets the message",)),
            Parameter(choices("text|text|message|body|content"), "string", "text", ("The text of the message",)),
        ),
        choices(
            'Send {name} the message "{text}".|Send a message to {name}: {text}|Write to {name}: {text}|'
            'Send "{text}" to {name}.|Tell {name}: {text}'
        ),
        (Outcome(("sent", "ok", "done", {"status": "!sent"}, {"sent": True}), "I sent the message to {name}."),),
        _message,
    ),
    "population": Kind(
        choices("get_population|population|count_people"),
        choices("Get the number of people in a country|Returns the population of a country."),
        (Parameter(choices("country|country|name"), "string", "country", ("The name of the country",)),),
        choices("How many people live in {country}?|What is the population of {country}?"),
        (
            Outcome(
                ("{people}", {"population": "people"}, {"country": "country", "people": "people"}),
                "{people} people live in {country}.",
            ),
        ),
        _country,
    ),
    "search": Kind(
        choices("search|search|web_search|search_web|look_up"),
        choices("Search the web|Searches for a text.|Look something up"),
        (Parameter(choices("query|query|q|text|topic"), "string", "topic", ("What to search for",)),),
        choices("Search for {topic}.|Search the web for {topic}.|Look up {topic}.|Please search for {topic}."),
        (Outcome(("{found}", {"result": "found"}, {"results": ["found"]}), "I found this: {found}."),),
        _search,
    ),
    "price": Kind(
        choices("get_stock_price|get_price|stock_price|quote"),
        choices("Get the price of a stock|Returns the price of a share."),
        (Parameter(choices("symbol|symbol|ticker|name"), "string", "symbol", ("The symbol of the stock",)),),
        choices("What is the price of {symbol}?|How much is {symbol}?|Get the stock price of {symbol}."),
        (Outcome(("{price}", {"price": "price"}, {"symbol": "symbol", "price": "price"}), "{symbol} is at {price}."),),
        _stock,
    ),
    "order": Kind(
        choices("get_order|track_order|order_status|find_order"),
        choices("Get the state of an order|Tells where an order is."),
        (Parameter(choices("order_id|id|order|number"), "integer", "order", ("The number of the order",)),),
        choices("Where is order {order}?|What is the status of order {order}?|Where is my order {order}?"),
        (Outcome(("{state}", {"status": "state"}, {"order": "order", "state": "state"}), "Order {order} is {state}."),),
        _order,
    ),
    "timer": Kind(
        choices("set_timer|start_timer|timer"),
        choices("Set a timer|Starts a timer."),
        (Parameter(choices("minutes|minutes|duration|time"), "integer", "count", ("How many minutes",)),),
        choices("Set a timer for {count} minutes.|Start a timer of {count} minutes.|Wake me in {count} minutes."),
        (Outcome(("ok", "done", {"status": "!ok"}, {"started": True}), "The timer is set for {count} minutes."),),
        _counted,
    ),
    "dice": Kind(
        choices("roll_dice|roll_die|roll"),
        choices("Roll a die|Rolls a die with some sides."),
        (Parameter(choices("sides|sides|faces|n"), "integer", "sides", ("How many sides the die has",)),),
        choices("Roll a die with {sides} sides.|Throw a die with {sides} sides.|Please roll a die of {sides} sides."),
        (Outcome(("{thrown}", {"result": "thrown"}, {"value": "thrown"}), "The die shows {thrown}."),),
        _counted,
    ),
}


def made_up_kind(rng: random.Random) -> Kind:
    """A tool of which only its name says what it does, such as `open_door(name)`."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    name = rng.choice([f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"])
    is_number = rng.random() < 0.3
    names = ["id", "number", f"{noun}_id"] if is_number else ["name", "title", noun, f"{noun}_name", "value"]

    def draw(rng: random.Random) -> Values:
        word = rng.choice([rng.choice(NAMES), rng.choice(COLOUR_NAMES), invented_name(rng), rng.choice(ANIMAL_NAMES)])
        return {"value": number(rng) if is_number else word, "found": rng.choice([invented_name(rng), number(rng)])}

    asked = f"{verb} the {noun} {{value}}"
    return Kind(
        (name,),
        (f"{capitalized(verb)} a {noun}", f"{capitalized(verb)}s a {noun}."),
        (Parameter((rng.choice(names),), "integer" if is_number else "string", "value", (f"The {noun}",)),),
        (f"{capitalized(asked)}.", f"Please {asked}.", f"Can you {asked}?", f"{capitalized(asked)}, please."),
        (
            Outcome(("ok", "done", {"status": "!ok"}, {"success": True}), "Done."),
            Outcome(("{found}", {"result": "found"}), "The result is {found}."),
        ),
        draw,
    )


def filled(template: Any, values: Values) -> Any:
    """A result with values: texts have `{name}`; in objects a text is the name of a value, or itself after `!`."""
    if isinstance(template, dict):
        return {key: _member(value, values) for key, value in template.items()}
    shown = {**values, **{capitalized(name): capitalized(str(value)) for name, value in values.items()}}
    return re.sub(r"\{(\w+)\}", lambda match: str(shown[match[1]]), template)


def _member(value: Any, values: Values) -> Any:
    if isinstance(value, list):
        return [_member(each, values) for each in value]
    if not isinstance(value, str):
        return value
    return value.removeprefix("!") if value.startswith("!") else values[value]
