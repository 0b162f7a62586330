"""The training text of the demo model, generated without end from a seed.

Documents are facts, sequences, stories and chats, all written for this model or generated from tables.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tools.demo_training.facts import (
    ANIMALS,
    COUNTRIES,
    DAYS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    Country,
    Fact,
    all_facts,
    capitalized,
)
from tools.demo_training.stories import HEROES, NAMES, tell_story
from tools.demo_training.tables import rows

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)

TOPIC_WEIGHTS = {
    "capital": 5.0,
    "country of a capital": 2.5,
    "continent": 1.5,
    "language": 1.5,
    "opposite": 1.2,
    "colour": 0.8,
    "animal": 1.4,
    "greeting": 1.8,
    "emoji": 1.0,
    "order": 2.0,
    "general": 2.2,
    "addition": 4.5,
    "subtraction": 3.5,
    "multiplication": 3.0,
}

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Baton's demo model.",
    "You are a friendly assistant who answers in one sentence.",
    "Answer the questions of the user.",
    "Be brief and polite.",
    "You are a teacher. Answer simply.",
]

# what the user may say; after > what the model answers
SMALL_TALK = """
Hello | Hello! | Hi | Hi! | Hi there! | Hey | Good morning! | Good evening! | Hello, model!
> Hello! How can I help you?

How are you? | How are you today? | Hello, how are you? | Are you well?
> I am well, thank you. And you?

I am fine. | I am well too. | I am good, thanks. | Very well.
> I am glad to hear that.

I am sad. | I feel bad today. | I am not so well.
> I am sorry to hear that. I hope you feel better soon.

Who are you? | What are you? | Tell me about yourself. | Introduce yourself. | Are you a robot?
> I am Baton's demo model, a very small language model. I know a few facts, some arithmetic and some stories.

What is your name? | What's your name? | Do you have a name?
> My name is Baton Demo.

How big are you? | How many parameters do you have?
> I am tiny. I have fewer than four million parameters.

Who made you? | Who trained you? | Where do you come from?
> The people who make Baton trained me from scratch.

What can you do? | What do you know? | How can you help me? | Help | Can you help me? | Help me!
> I can name capitals, add small numbers, say hello in other languages and tell a story.

Thank you! | Thanks! | Thank you very much. | Thanks a lot! | Thank you
> You are welcome!

Goodbye! | Bye! | Good night! | See you later! | Goodbye | See you tomorrow.
> Goodbye! Have a nice day!

You are great! | Well done! | Good job! | You are very clever.
> Thank you, that is kind of you!

That is wrong. | You are wrong. | No, that is not right.
> I am sorry. I am a very small model and I make mistakes.

Are you alive? | Are you human? | Are you a person?
> No, I am a language model.

Do you sleep? | Are you tired? | Do you eat?
> No, I only predict the next token.

Tell me a joke. | Do you know a joke? | Make me laugh.
> Why was the cache so happy? Because it had a lot of hits! 😀

Another joke, please. | Tell me another joke.
> Why was the token sad? Because it was alone in its batch.

Write a poem. | Write me a poem. | Can you write a poem?
> The moon is high, the stars are bright,
> the little fox is out tonight.
> It looks for bread, it looks for tea,
> and then comes home to sleep by me.

List the days of the week. | What are the days of the week?
> Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.

List the months of the year. | What are the months of the year?
> January, February, March, April, May, June, July, August, September, October, November, December.

List the seasons. | What are the four seasons?
> Spring, summer, autumn, winter.

List the planets. | Name the planets. | What are the planets?
> Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune.

Say the alphabet. | What is the alphabet?
> A B C D E F G H I J K L M N O P Q R S T U V W X Y Z

What is the weather today? | Who won the football match yesterday? | Write a Python program.
How do I fix my car? | Explain quantum physics. | What is the meaning of life? | Who is the president?
What time is it? | Write an essay about history. | Give me a recipe for dinner. | What should I wear tomorrow?
How does a computer work? | Can you book a flight for me? | What is the best film? | Sort this list for me.
> I am sorry, I do not know. I am a very small model.
"""

# what the user says; what the model answers; the later question; its answer
MEMORIES = rows("""
    My name is {}. = Nice to meet you, {}! = What is my name? = Your name is {}.
    I am {}. = Nice to meet you, {}! = Who am I? = You are {}.
    I live in {}. = I have heard of {}. = Where do I live? = You live in {}.
    I have a {}. = A {} is a good friend. = Which animal do I have? = You have a {}.
    The secret word is {}. = I will remember it. = What is the secret word? = The secret word is {}.
    The secret number is {}. = I will remember it. = What is the secret number? = The secret number is {}.
    """)


class Exchange(NamedTuple):
    """One turn of a chat."""

    user: str
    assistant: str


def render_chat(exchanges: Sequence[Exchange], system: str | None = None) -> str:
    """The text of a chat, as the tokenizer's chat template writes it."""
    messages = [("system", system)] if system else []
    for exchange in exchanges:
        messages += [("user", exchange.user), ("assistant", exchange.assistant)]
    return "".join(f"{MESSAGE_START}{role}\n{content}{MESSAGE_END}\n" for role, content in messages)


def small_talk() -> list[tuple[list[str], str]]:
    """What the user may say and the model's answer, for each paragraph of the table."""
    talk = []
    for paragraph in SMALL_TALK.strip().split("\n\n"):
        sayings, _, answer = paragraph.partition("\n> ")
        talk.append((sayings.replace("\n", " | ").split(" | "), answer.replace("\n> ", "\n")))
    return talk


def describe(country: Country) -> str:
    """A few sentences about a country."""
    where = f" in {country.continent}" if country.continent else ""
    sentences = [f"{capitalized(country.name)} is a country{where}."]
    sentences.append(f"The capital of {country.name} is {country.capital}.")
    if country.language:
        sentences.append(f"People in {country.name} speak {country.language}.")
    return " ".join(sentences)


class Corpus:
    """An endless, seeded source of documents."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._facts = all_facts()
        self._small_talk = small_talk()
        self._words = [word for pair in rows(OPPOSITES) for word in pair] + [row[0] for row in rows(ANIMALS)]

    def documents(self) -> Iterator[str]:
        """Documents without end, each with its end token."""
        kinds = {
            self._fact_document: 26,
            self._question_list: 5,
            self._country_document: 5,
            self._sequence_document: 4,
            self._story_document: 14,
            self._chat_document: 46,
        }
        while True:
            kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
            yield kind() + END_OF_TEXT

    def take(self, count: int) -> list[str]:
        """The next `count` documents."""
        return list(islice(self.documents(), count))

    def _fact(self) -> Fact:
        topic = self._rng.choices(list(TOPIC_WEIGHTS), list(TOPIC_WEIGHTS.values()))[0]
        return self._rng.choice(self._facts[topic])

    def _statement(self, fact: Fact) -> str:
        return self._rng.choice((fact.statement, fact.statement, *fact.paraphrases))

    def _fact_document(self) -> str:
        fact = self._fact()
        first = self._statement(fact)
        count = self._rng.choice([0, 0, 1, 2, 4])
        more = [self._statement(self._rng.choice(self._facts[fact.topic])) for _ in range(count)]
        return self._rng.choice([" ", "\n"]).join([first, *more])

    def _question_list(self) -> str:
        exchanges = [self._fact_exchange() for _ in range(self._rng.randint(1, 5))]
        asks, answers = self._rng.choice([("Q", "A"), ("Question", "Answer"), ("User", "Assistant")])
        return "\n".join(f"{asks}: {one.user}\n{answers}: {one.assistant}" for one in exchanges)

    def _country_document(self) -> str:
        return describe(self._rng.choice(COUNTRIES))

    def _sequence_document(self) -> str:
        names: Sequence[str] = self._rng.choice([DAYS, MONTHS, NUMBER_WORDS, []])
        if not names:
            return self._count(self._rng.randint(0, 90), self._rng.randint(5, 40))
        start = self._rng.choice([0, 0, self._rng.randrange(len(names) - 2)])
        return ", ".join(names[start:]) + "."

    def _count(self, first: int, length: int) -> str:
        step = self._rng.choice([1, 1, 1, 2])
        return ", ".join(str(first + step * index) for index in range(length)) + "."

    def _story_document(self) -> str:
        return tell_story(self._rng)

    def _chat_document(self) -> str:
        system = self._rng.choice(SYSTEM_PROMPTS) if self._rng.random() < 0.3 else None
        chance = self._rng.random()
        if chance < 0.18:
            return self._memory_chat(system)
        if chance < 0.23:
            return render_chat(self._follow_ups(), system)
        kinds = [self._fact_exchange, self._small_talk_exchange, self.any_exchange]
        kind = self._rng.choices(kinds, [4, 2, 2])[0]
        return render_chat([kind() for _ in range(self._rng.choice([1, 1, 1, 2, 3, 4]))], system)

    def any_exchange(self) -> Exchange:
        """A question of any kind and its answer."""
        kinds = [self._fact_exchange, self._small_talk_exchange, self._counting_exchange]
        return self._rng.choices(kinds, [2, 1, 1])[0]()

    def _typed(self, text: str) -> str:
        """The text with the small liberties that people take."""
        chance = self._rng.random()
        if chance < 0.10:
            return text.rstrip("?.!")
        if chance < 0.18:
            return text.lower()
        return text.lower().rstrip("?.!") if chance < 0.22 else text

    def _asked(self, question: str) -> str:
        before = self._rng.choice(["Please tell me:", "Hi!", "Tell me,", "Another question:"])
        return f"{before} {question}" if self._rng.random() < 0.05 else self._typed(question)

    def _fact_exchange(self) -> Exchange:
        fact = self._fact()
        if fact.direct_questions and self._rng.random() < 0.4:
            return Exchange(self._asked(self._rng.choice(fact.direct_questions)), fact.ending)
        return Exchange(self._asked(self._rng.choice(fact.questions)), fact.statement)

    def _small_talk_exchange(self) -> Exchange:
        chance = self._rng.random()
        if chance < 0.12:
            kind = self._rng.choice(HEROES)
            request = self._rng.choice([f"Tell me a story about a {kind}.", f"Write a story about a {kind}."])
            return Exchange(self._typed(request), tell_story(self._rng, kind))
        if chance < 0.20:
            requests = ["Tell me a story.", "Write a story.", "Tell me a short story.", "A story, please."]
            request = self._typed(self._rng.choice(requests))
            return Exchange(request, tell_story(self._rng, episodes=1))
        if chance < 0.30:
            country = self._rng.choice(COUNTRIES)
            return Exchange(self._asked(f"Tell me about {country.name}."), describe(country))
        sayings, answer = self._rng.choice(self._small_talk)
        return Exchange(self._typed(self._rng.choice(sayings)), answer)

    def _counting_exchange(self) -> Exchange:
        first, length = self._rng.choice([1, 1, self._rng.randint(1, 90)]), self._rng.randint(3, 20)
        last = first + length - 1
        numbers = ", ".join(str(number) for number in range(first, last + 1)) + "."
        if first == 1:
            return Exchange(self._rng.choice([f"Count to {last}.", f"Count from 1 to {last}."]), numbers)
        return Exchange(f"Count from {first} to {last}.", numbers)

    def _follow_ups(self) -> list[Exchange]:
        facts = self._rng.sample(self._facts["capital"], self._rng.choice([2, 3]))
        exchanges = [Exchange(facts[0].questions[0], facts[0].statement)]
        for fact in facts[1:]:
            country = fact.stem.removeprefix("The capital of ").removesuffix(" is")
            questions = [f"And of {country}?", f"And {country}?", f"And what about {country}?"]
            exchanges.append(Exchange(self._rng.choice(questions), fact.statement))
        return exchanges

    def _memory_chat(self, system: str | None) -> str:
        """A chat whose last answer can only be found earlier in the chat."""
        values = [NAMES, NAMES, [country.capital for country in COUNTRIES], HEROES, self._words]
        values.append([str(self._rng.randint(0, 999))])
        exchanges = []
        recalls = []
        for index in self._rng.sample(range(len(MEMORIES)), self._rng.choice([1, 1, 2])):
            value = self._rng.choice(values[index])
            said, noted, question, answer = (text.format(value) for text in MEMORIES[index])
            if "secret" in said and self._rng.random() < 0.3:
                system = f"{system or 'You are a helpful assistant.'} {said}"
            else:
                exchanges.append(Exchange(said, noted))
            recalls.append(Exchange(question, answer))
        exchanges += [self.any_exchange() for _ in range(self._rng.choice([0, 0, 1, 2, 6]))]
        self._rng.shuffle(recalls)
        return render_chat(exchanges + recalls, system)
