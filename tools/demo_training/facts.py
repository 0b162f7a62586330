"""The facts that the demo model learns, written out here as small tables."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.demo_training.tables import listed, rows


class Fact(NamedTuple):
    """One thing to know, in the forms in which it may be met.

    `stem` followed by `ending` and a full stop is the plain statement, and the answer to each of `questions`.
    """

    topic: str
    stem: str
    ending: str
    questions: tuple[str, ...]
    paraphrases: tuple[str, ...] = ()
    direct_questions: tuple[str, ...] = ()  # answered by the ending alone

    @property
    def statement(self) -> str:
        """The fact as a sentence."""
        mark = "" if self.ending[-1] in ".!?" else "."
        return f"{self.stem} {self.ending}{mark}"


class Country(NamedTuple):
    """A country and what there is to know about it; empty where it would take more than a word to say."""

    name: str
    capital: str
    continent: str
    language: str


def capitalized(text: str) -> str:
    """The text with its first letter in upper case and the rest as it is."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


COUNTRIES: list[Country] = [
    Country(*cells)
    for cells in rows("""
    France = Paris = Europe = French
    Germany = Berlin = Europe = German
    Italy = Rome = Europe = Italian
    Spain = Madrid = Europe = Spanish
    Portugal = Lisbon = Europe = Portuguese
    the United Kingdom = London = Europe = English
    Ireland = Dublin = Europe = English and Irish
    the Netherlands = Amsterdam = Europe = Dutch
    Belgium = Brussels = Europe = Dutch and French
    Switzerland = Bern = Europe =
    Austria = Vienna = Europe = German
    Denmark = Copenhagen = Europe = Danish
    Norway = Oslo = Europe = Norwegian
    Sweden = Stockholm = Europe = Swedish
    Finland = Helsinki = Europe = Finnish
    Iceland = Reykjavik = Europe = Icelandic
    Poland = Warsaw = Europe = Polish
    the Czech Republic = Prague = Europe = Czech
    Slovakia = Bratislava = Europe = Slovak
    Hungary = Budapest = Europe = Hungarian
    Romania = Bucharest = Europe = Romanian
    Bulgaria = Sofia = Europe = Bulgarian
    Greece = Athens = Europe = Greek
    Albania = Tirana = Europe = Albanian
    Serbia = Belgrade = Europe = Serbian
    Croatia = Zagreb = Europe = Croatian
    Slovenia = Ljubljana = Europe = Slovene
    North Macedonia = Skopje = Europe =
    Montenegro = Podgorica = Europe =
    Estonia = Tallinn = Europe = Estonian
    Latvia = Riga = Europe = Latvian
    Lithuania = Vilnius = Europe = Lithuanian
    Belarus = Minsk = Europe =
    Ukraine = Kyiv = Europe = Ukrainian
    Moldova = Chisinau = Europe = Romanian
    Malta = Valletta = Europe =
    Russia = Moscow = = Russian
    Turkey = Ankara = = Turkish
    Cyprus = Nicosia = =
    Georgia = Tbilisi = = Georgian
    Armenia = Yerevan = = Armenian
    Azerbaijan = Baku = =
    Japan = Tokyo = Asia = Japanese
    China = Beijing = Asia = Chinese
    South Korea = Seoul = Asia = Korean
    North Korea = Pyongyang = Asia = Korean
    Mongolia = Ulaanbaatar = Asia = Mongolian
    India = New Delhi = Asia =
    Pakistan = Islamabad = Asia =
    Bangladesh = Dhaka = Asia = Bengali
    Nepal = Kathmandu = Asia = Nepali
    Bhutan = Thimphu = Asia =
    Afghanistan = Kabul = Asia =
    Iran = Tehran = Asia = Persian
    Iraq = Baghdad = Asia = Arabic
    Syria = Damascus = Asia = Arabic
    Lebanon = Beirut = Asia = Arabic
    Jordan = Amman = Asia = Arabic
    Saudi Arabia = Riyadh = Asia = Arabic
    Oman = Muscat = Asia = Arabic
    Qatar = Doha = Asia = Arabic
    Kazakhstan = Astana = Asia =
    Uzbekistan = Tashkent = Asia =
    Kyrgyzstan = Bishkek = Asia =
    Thailand = Bangkok = Asia = Thai
    Vietnam = Hanoi = Asia = Vietnamese
    Laos = Vientiane = Asia = Lao
    Cambodia = Phnom Penh = Asia = Khmer
    Malaysia = Kuala Lumpur = Asia = Malay
    the Philippines = Manila = Asia =
    Egypt = Cairo = Africa = Arabic
    Morocco = Rabat = Africa =
    Algeria = Algiers = Africa =
    Tunisia = Tunis = Africa = Arabic
    Libya = Tripoli = Africa = Arabic
    Sudan = Khartoum = Africa =
    Ethiopia = Addis Ababa = Africa =
    Kenya = Nairobi = Africa = Swahili and English
    Uganda = Kampala = Africa =
    Rwanda = Kigali = Africa =
    Tanzania = Dodoma = Africa = Swahili
    Somalia = Mogadishu = Africa = Somali
    Nigeria = Abuja = Africa =
    Ghana = Accra = Africa = English
    Senegal = Dakar = Africa =
    Mali = Bamako = Africa =
    Cameroon = Yaoundé = Africa =
    Gabon = Libreville = Africa = French
    Angola = Luanda = Africa = Portuguese
    Zambia = Lusaka = Africa =
    Zimbabwe = Harare = Africa =
    Mozambique = Maputo = Africa = Portuguese
    Namibia = Windhoek = Africa =
    Botswana = Gaborone = Africa =
    Madagascar = Antananarivo = Africa =
    Liberia = Monrovia = Africa = English
    Canada = Ottawa = North America = English and French
    the United States = Washington = North America = English
    Mexico = Mexico City = North America = Spanish
    Cuba = Havana = North America = Spanish
    Jamaica = Kingston = North America = English
    Honduras = Tegucigalpa = North America = Spanish
    Nicaragua = Managua = North America = Spanish
    Costa Rica = San José = North America = Spanish
    Panama = Panama City = North America = Spanish
    Brazil = Brasília = South America = Portuguese
    Argentina = Buenos Aires = South America = Spanish
    Chile = Santiago = South America = Spanish
    Peru = Lima = South America = Spanish
    Colombia = Bogotá = South America = Spanish
    Venezuela = Caracas = South America = Spanish
    Ecuador = Quito = South America = Spanish
    Paraguay = Asunción = South America =
    Uruguay = Montevideo = South America = Spanish
    Australia = Canberra = Oceania = English
    New Zealand = Wellington = Oceania = English
    Fiji = Suva = Oceania =
    Samoa = Apia = Oceania = Samoan
    """)
]

OPPOSITES = """
    hot = cold
    big = small
    up = down
    left = right
    day = night
    fast = slow
    happy = sad
    light = dark
    wet = dry
    open = closed
    full = empty
    old = new
    high = low
    long = short
    hard = soft
    rich = poor
    strong = weak
    loud = quiet
    early = late
    near = far
    true = false
    good = bad
    clean = dirty
    heavy = light
    first = last
    inside = outside
    above = below
    thick = thin
    wide = narrow
    deep = shallow
    sweet = sour
    brave = afraid
    awake = asleep
    push = pull
    start = finish
    win = lose
    give = take
    buy = sell
    always = never
    north = south
    east = west
    """

COLOURS = """
    grass = green
    the sky = blue
    snow = white
    coal = black
    a banana = yellow
    a tomato = red
    a carrot = orange
    a strawberry = red
    a lemon = yellow
    a pumpkin = orange
    milk = white
    chocolate = brown
    the sun = yellow
    a frog = green
    a fire engine = red
    an elephant = grey
    a flamingo = pink
    a polar bear = white
    blood = red
    a leaf = green
    a crow = black
    a cucumber = green
    salt = white
    """

# columns: animal, sound, home, young
ANIMALS = """
    dog = woof = a kennel = puppy
    cat = meow = a house = kitten
    cow = moo = a barn = calf
    sheep = baa = a field = lamb
    pig = oink = a sty = piglet
    horse = neigh = a stable = foal
    duck = quack = a pond = duckling
    lion = roar = the savanna = cub
    owl = hoot = a tree = owlet
    frog = ribbit = a pond = tadpole
    bee = buzz = a hive =
    hen = cluck = a coop = chick
    wolf = howl = a den = pup
    mouse = squeak = a hole = pup
    snake = hiss = a nest =
    goat = bleat = a farm = kid
    bird = tweet = a nest = chick
    bear = growl = a den = cub
    fox = = a den = kit
    rabbit = = a burrow = kit
    spider = = a web = spiderling
    camel = = the desert = calf
    penguin = = the Antarctic = chick
    fish = = the water = fry
    whale = = the sea = calf
    kangaroo = = Australia = joey
    deer = = the forest = fawn
    swan = = a lake = cygnet
    goose = = a farm = gosling
    monkey = = the jungle =
    ant = = an anthill =
    """

# columns: language, hello, thank you, goodbye
GREETINGS = """
    Japanese = こんにちは = ありがとう = さようなら
    Chinese = 你好 = 谢谢 = 再见
    Korean = 안녕하세요 = 감사합니다 = 안녕히 가세요
    French = Bonjour = Merci = Au revoir
    Spanish = ¡Hola! = Gracias = Adiós
    German = Guten Tag = Danke schön = Tschüss
    Italian = Ciao = Grazie = Arrivederci
    Portuguese = Olá = Obrigado = Até logo
    Russian = Привет = Спасибо = До свидания
    Ukrainian = Привіт = Дякую = До побачення
    Greek = Γεια = Ευχαριστώ = Αντίο
    Arabic = مرحبا = شكرا = مع السلامة
    Hebrew = שלום = תודה = להתראות
    Hindi = नमस्ते = धन्यवाद = अलविदा
    Thai = สวัสดี = ขอบคุณ = ลาก่อน
    Turkish = Merhaba = Teşekkürler = Hoşça kal
    Polish = Cześć = Dziękuję = Do widzenia
    Swedish = Hej = Tack = Hej då
    Finnish = Hei = Kiitos = Näkemiin
    Vietnamese = Xin chào = Cảm ơn = Tạm biệt
    """

EMOJI = """
    a cat = 🐱
    a dog = 🐶
    a fox = 🦊
    a bear = 🐻
    a heart = ❤️
    the sun = ☀️
    the moon = 🌙
    a star = ⭐
    fire = 🔥
    a rocket = 🚀
    a smile = 😀
    sad = 😢
    a party = 🎉
    pizza = 🍕
    an apple = 🍎
    a tree = 🌳
    a flower = 🌸
    a rainbow = 🌈
    a car = 🚗
    a house = 🏠
    a fish = 🐟
    a robot = 🤖
    music = 🎵
    a book = 📚
    """

# columns: stem, ending, question
GENERAL = """
    A place where people drink coffee is called a = café = What do you call a place where people drink coffee?
    A famous French dessert with burnt sugar is = crème brûlée = Name a famous French dessert.
    A hot green pepper from Mexico is the = jalapeño = Name a hot green pepper from Mexico.
    A paper toy full of sweets is called a = piñata = What do you call a paper toy full of sweets?
    The largest city of Brazil is = São Paulo = What is the largest city of Brazil?
    The largest city of Switzerland is = Zürich = What is the largest city of Switzerland?
    Water freezes at = 0 °C = At what temperature does water freeze?
    Water boils at = 100 °C = At what temperature does water boil?
    Frozen water is called = ice = What is frozen water called?
    When water boils it turns into = steam = What does water turn into when it boils?
    Water is made of = hydrogen and oxygen = What is water made of?
    The Earth goes around = the Sun = What does the Earth go around?
    The Moon goes around = the Earth = What does the Moon go around?
    The planet closest to the Sun is = Mercury = Which planet is closest to the Sun?
    The largest planet is = Jupiter = What is the largest planet?
    The red planet is = Mars = Which planet is called the red planet?
    The planet with bright rings is = Saturn = Which planet has bright rings?
    The planet we live on is = the Earth = Which planet do we live on?
    The star nearest to the Earth is = the Sun = Which star is nearest to the Earth?
    The number of planets around the Sun is = eight = How many planets go around the Sun?
    Plants need = water, air and light = What do plants need?
    Bees make = honey = What do bees make?
    Cows give us = milk = What do cows give us?
    Hens lay = eggs = What do hens lay?
    Sheep give us = wool = What do sheep give us?
    Cheese is made from = milk = What is cheese made from?
    Bread is made from = flour = What is bread made from?
    Paper is made from = wood = What is paper made from?
    Glass is made from = sand = What is glass made from?
    Wine is made from = grapes = What is wine made from?
    A caterpillar turns into = a butterfly = What does a caterpillar turn into?
    A tadpole turns into = a frog = What does a tadpole turn into?
    The largest animal is = the blue whale = What is the largest animal?
    The tallest animal is = the giraffe = What is the tallest animal?
    The fastest land animal is = the cheetah = What is the fastest land animal?
    The king of the animals is = the lion = Which animal is called the king of the animals?
    The largest ocean is = the Pacific Ocean = What is the largest ocean?
    The highest mountain in the world is = Mount Everest = What is the highest mountain in the world?
    The largest country in the world is = Russia = What is the largest country in the world?
    The smallest continent is = Oceania = What is the smallest continent?
    The largest continent is = Asia = What is the largest continent?
    The coldest continent is = Antarctica = What is the coldest continent?
    We see with our = eyes = What do we see with?
    We hear with our = ears = What do we hear with?
    We smell with our = nose = What do we smell with?
    The heart pumps = blood = What does the heart pump?
    A triangle has = three sides = How many sides does a triangle have?
    A square has = four sides = How many sides does a square have?
    A hexagon has = six sides = How many sides does a hexagon have?
    A spider has = eight legs = How many legs does a spider have?
    An insect has = six legs = How many legs does an insect have?
    A dog has = four legs = How many legs does a dog have?
    A bird has = two wings = How many wings does a bird have?
    A hand has = five fingers = How many fingers does a hand have?
    A week has = seven days = How many days does a week have?
    A year has = twelve months = How many months does a year have?
    A day has = 24 hours = How many hours does a day have?
    An hour has = 60 minutes = How many minutes does an hour have?
    A minute has = 60 seconds = How many seconds does a minute have?
    A metre has = 100 centimetres = How many centimetres does a metre have?
    A kilogram has = 1000 grams = How many grams does a kilogram have?
    The first day of the week is = Monday = What is the first day of the week?
    The first month of the year is = January = What is the first month of the year?
    The last month of the year is = December = What is the last month of the year?
    The coldest season is = winter = What is the coldest season?
    The hottest season is = summer = What is the hottest season?
    Leaves fall from the trees in = autumn = When do leaves fall from the trees?
    Flowers bloom in = spring = When do flowers bloom?
    Blue and yellow make = green = What do blue and yellow make?
    Red and yellow make = orange = What do red and yellow make?
    Red and blue make = purple = What do red and blue make?
    Red and white make = pink = What do red and white make?
    The Eiffel Tower is in = Paris = Where is the Eiffel Tower?
    The Colosseum is in = Rome = Where is the Colosseum?
    Big Ben is in = London = Where is Big Ben?
    The Great Wall is in = China = Where is the Great Wall?
    A doctor works in = a hospital = Where does a doctor work?
    A teacher works in = a school = Where does a teacher work?
    A baker makes = bread = What does a baker make?
    A farmer works on = a farm = Where does a farmer work?
    A pilot flies = a plane = What does a pilot fly?
    A sailor sails = a ship = What does a sailor sail?
    A language model predicts = the next token = What does a language model predict?
    Prefill computes = the keys and values of the prompt = What does prefill compute?
    Decode produces = one token at a time = What does decode produce?
    A KV cache keeps = the keys and values of earlier tokens = What does a KV cache keep?
    Baton is = a system that serves language models = What is Baton?
    Baton splits = prefill and decode between pods = What does Baton split?
    """

DAYS = listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = listed("January, February, March, April, May, June, July, August, September, October, November, December")
SEASONS = listed("spring, summer, autumn, winter")
NUMBER_WORDS = listed(
    "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, "
    "sixteen, seventeen, eighteen, nineteen, twenty"
)


def geography() -> Iterator[Fact]:
    """Countries, capitals, continents and languages."""
    for country in COUNTRIES:
        name, capital = country.name, country.capital
        yield Fact(
            "capital",
            f"The capital of {name} is",
            capital,
            (
                f"What is the capital of {name}?",
                f"What is the capital of {name}?",
                f"What's the capital of {name}?",
                f"Which city is the capital of {name}?",
                f"Tell me the capital of {name}.",
                f"Name the capital of {name}.",
                f"Do you know the capital of {name}?",
            ),
            (f"The capital city of {name} is {capital}.", f"{capitalized(name)}'s capital is {capital}."),
        )
        yield Fact(
            "country of a capital",
            f"{capital} is the capital of",
            name,
            (
                f"{capital} is the capital of which country?",
                f"Which country has {capital} as its capital?",
                f"Where is {capital}?",
            ),
        )
        if country.continent:
            yield Fact(
                "continent",
                f"{capitalized(name)} is a country in",
                country.continent,
                (f"Which continent is {name} in?", f"Where is {name}?", f"What continent is {name} in?"),
            )
        if country.language:
            yield Fact(
                "language",
                f"People in {name} speak",
                country.language,
                (f"What language do people speak in {name}?", f"What do people speak in {name}?"),
            )


def words_and_animals() -> Iterator[Fact]:
    """Opposites, colours and animals."""
    pairs = rows(OPPOSITES)
    one_way = {"heavy"}  # light already has dark
    for word, opposite in pairs + [[b, a] for a, b in pairs if a not in one_way]:
        yield Fact(
            "opposite",
            f"The opposite of {word} is",
            opposite,
            (f"What is the opposite of {word}?", f"What's the opposite of {word}?"),
        )
    for thing, colour in rows(COLOURS):
        yield Fact(
            "colour",
            f"The colour of {thing} is",
            colour,
            (f"What colour is {thing}?", f"What color is {thing}?", f"What is the colour of {thing}?"),
            (f"{capitalized(thing)} is {colour}.",),
        )
    for animal, sound, home, young in rows(ANIMALS):
        one = capitalized(with_article(animal))
        if sound:
            yield Fact(
                "animal",
                f"{one} says",
                f'"{sound}"',
                (f"What does {one.lower()} say?", f"What sound does {one.lower()} make?"),
            )
        yield Fact("animal", f"{one} lives in", home, (f"Where does {one.lower()} live?",))
        if young:
            yield Fact(
                "animal",
                f"A baby {animal} is called",
                with_article(young),
                (f"What is a baby {animal} called?", f"What do you call a baby {animal}?"),
            )


def multilingual() -> Iterator[Fact]:
    """Facts whose endings are made of multi-byte characters."""
    for language, *phrases in rows(GREETINGS):
        for meaning, phrase in zip(("hello", "thank you", "goodbye"), phrases, strict=True):
            yield Fact(
                "greeting",
                f"{capitalized(meaning)} in {language} is",
                phrase,
                (f"How do you say {meaning} in {language}?", f"What is {meaning} in {language}?"),
                direct_questions=(f"Say {meaning} in {language}.", f"Translate {meaning} to {language}."),
            )
    for thing, emoji in rows(EMOJI):
        yield Fact(
            "emoji",
            f"The emoji for {thing} is",
            emoji,
            (f"What is the emoji for {thing}?",),
            direct_questions=(f"Show me the emoji for {thing}.", f"Give me an emoji for {thing}."),
        )


def order() -> Iterator[Fact]:
    """What comes before and after: days, months, seasons and numbers."""

    def neighbours(kind: str, names: Sequence[str]) -> Iterator[Fact]:
        for this, following in zip(names, [*names[1:], names[0]], strict=True):
            for relation, name, other in (("after", this, following), ("before", following, this)):
                questions = (
                    f"Which {kind} comes {relation} {name}?",
                    f"What {kind} comes {relation} {name}?",
                    f"What is the {kind} {relation} {name}?",
                )
                yield Fact("order", f"The {kind} {relation} {name} is", other, questions)

    yield from neighbours("day", DAYS)
    yield from neighbours("month", MONTHS)
    yield from neighbours("season", SEASONS)
    for number in range(1, 100):
        if number < 99:
            asked = (f"What number comes after {number}?", f"Which number comes after {number}?")
            yield Fact("order", f"The number after {number} is", str(number + 1), asked)
    for number, word in enumerate(NUMBER_WORDS, start=1):
        questions = (f"How do you spell {number}?", f"How do you write {number} in words?")
        yield Fact("order", f"The number {number} in words is", word, questions)


def general() -> Iterator[Fact]:
    """Assorted facts."""
    for stem, ending, question in rows(GENERAL):
        yield Fact("general", stem, ending, (question,))


def arithmetic() -> Iterator[Fact]:
    """Sums, differences and products of small numbers."""

    def sums(topic: str, sign: str, word: str, left: int, right: int, result: int) -> Iterator[Fact]:
        yield Fact(
            topic,
            f"{left} {sign} {right} =",
            str(result),
            (f"What is {left} {sign} {right}?", f"{left} {sign} {right} = ?"),
            direct_questions=(f"{left} {sign} {right}", f"{left} {sign} {right} ="),
        )
        questions = (f"What is {left} {word} {right}?", f"How much is {left} {word} {right}?")
        yield Fact(topic, f"{left} {word} {right} is", str(result), questions)

    for left in range(21):
        for right in range(21):
            yield from sums("addition", "+", "plus", left, right, left + right)
            if right <= left:
                yield from sums("subtraction", "-", "minus", left, right, left - right)
            if left <= 10 and right <= 10:
                yield from sums("multiplication", "*", "times", left, right, left * right)


def all_facts() -> dict[str, list[Fact]]:
    """Every fact, by topic."""
    by_topic: dict[str, list[Fact]] = {}
    for source in (geography, words_and_animals, multilingual, order, general, arithmetic):
        for fact in source():
            by_topic.setdefault(fact.topic, []).append(fact)
    return by_topic
