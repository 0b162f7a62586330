"""Short stories from a template grammar.

`[a|b]` is a choice; `{hero}` and the like are names that stay the same for a whole story.
"""

import random
import re

from tools.demo_training.tables import listed, paragraphs

HEROES = listed(
    "fox, rabbit, bear, mouse, turtle, cat, dog, duck, squirrel, hedgehog, frog, horse, lion, penguin, robot, dragon"
)
HE_NAMES = listed("Pip, Max, Oscar, Tom, Leo, Sam, Ben, Finn, Hugo, Theo, Milo, Felix")
SHE_NAMES = listed("Luna, Ruby, Bella, Lily, Mia, Nora, Ella, Zoe, Clara, Daisy, Rosa, Ivy")
NAMES = HE_NAMES + SHE_NAMES
PLACES = listed("forest, meadow, village, valley, garden, tall castle, house by the sea, quiet town")
THINGS = listed("red ball, golden key, little boat, blue hat, paper map, silver bell, warm scarf, big drum")
GOODIES = listed("honey cake, apple pie, sweet berries, warm soup, fresh bread, carrot cake")

OPENINGS = paragraphs("""
    Once upon a time, there was a [little|small|young|brave|clever] {kind} named {hero}.
    {Pronoun} lived in a {place}.

    Once upon a time, a [little|kind|curious|young] {kind} named {hero} lived in a {place}.

    Once upon a time, in a {place}, there lived a [little|happy|shy|clever] {kind} named {hero}.

    Once upon a time, there was a {kind} named {hero} who lived in a {place} with {possessive}
    [mother|family|friends].

    Once upon a time there lived a [little|brave|gentle] {kind} in a {place}. {Possessive} name was {hero}.

    There was once a [little|brave|happy] {kind} named {hero}, who lived in a {place}.

    {hero} was a [little|brave|curious|kind] {kind}. {Pronoun} lived in a {place}.

    In a {place} lived a [small|cheerful|clever] {kind} named {hero}.
    """)

FRIENDS = paragraphs("""
    {hero} had a good friend, a {friend_kind} named {friend}.

    {hero} had a [good|dear] friend named {friend}, who was a {friend_kind}.

    {Possessive} best friend was a {friend_kind} named {friend}.
    """)

TRAITS = paragraphs("""
    Every [morning|day|evening], {hero} liked to [sing|run|play|walk]
    [by the river|under the trees|on the hill].

    {hero} had a {thing}, and {pronoun} loved it very much.

    They [played|laughed|sang] together every day.

    {hero} loved to eat {goody}.

    {hero} was always [kind to others|full of questions|ready to help].
    """)

FIRST_EPISODES = paragraphs("""
    One day, {hero} could not find {possessive} {thing}. {Pronoun} looked
    [under the bed|behind the door|in the grass], but it was not there. "Where is my {thing}?"
    {pronoun} cried. Then {friend} the {friend_kind} came by. "Do not worry," said {friend}.
    "I will help you look." They looked everywhere, and at last they found it
    [under a big tree|near the river|on top of the hill].

    One [cold|windy|rainy] day, {hero} heard a small voice. It was {friend} the {friend_kind}, who was lost.
    "Can you help me find my way home?" asked {friend}. "Of course," said {hero}. They walked
    [all day|for a long time] until they saw a light in a window. {friend} was home at last.

    One [sunny|warm|bright] morning, {hero} went for a walk. On the way {pronoun} met {friend} the {friend_kind}.
    "Would you like to play with me?" asked {friend}. "Yes, I would!" said {hero}. They played
    [hide and seek|with the {thing}|by the water] until the sun went down.

    One day, {hero} found a {thing} on the road. {Pronoun} wanted to keep it, but {pronoun} knew it belonged
    to someone. So {pronoun} asked {friend} the {friend_kind}. "Yes, it is mine!" said {friend}.
    "Thank you for bringing it back." {hero} felt [very happy|proud] that {pronoun} had done the right thing.

    One day, {hero} and {friend} the {friend_kind} had a race. {hero} was fast, but {pronoun} stopped to
    [rest|eat|sleep] under a tree. {friend} was slow, but did not stop. In the end {friend} won the race.
    "Slow and steady wins," said {friend} with a smile.
    """)

LATER_EPISODES = paragraphs("""
    At night, {hero} could not sleep. The wind was loud and the room was dark.
    {Pronoun} was [afraid|a little scared]. Then {friend} the {friend_kind} came and sat by {object}.
    "It is only the wind," said {friend}. {hero} closed {possessive} eyes and soon {pronoun} was asleep.

    Then a big storm came. The river was high and the bridge was gone. {friend} the {friend_kind} was
    on the other side. "Help!" cried {friend}. {hero} was brave. {Pronoun} took a long rope and pulled
    {friend} across. "You saved me," said {friend}. "You are a true friend."

    Now {hero} wanted to plant a seed. {Pronoun} dug a hole and gave the seed water every day.
    "It takes time," said {friend} the {friend_kind}. {hero} waited and waited. Then, one morning,
    there was a [tall green plant|beautiful yellow flower|little tree] in the garden.

    It was {hero}'s birthday, but {pronoun} thought that everyone had forgotten it. {Pronoun} walked home
    slowly and opened the door. "Surprise!" said {friend} the {friend_kind}. There was {goody} for everyone,
    and a {thing} with a [red|blue|green] ribbon.

    When winter came, there was no food left. {hero} was hungry and cold. {friend} the {friend_kind} had {goody}
    and gave half of it to {hero}. "We will share," said {friend}. They sat by the fire and were [warm|happy]
    again.
    """)

LINKS = paragraphs("""
    The next day, the sun was shining again.

    Some days later, {hero} was walking in the {place}.

    After that, {hero} and {friend} were best friends.

    A week went by, and all was quiet in the {place}.
    """)

USUAL_ENDING = "And they all lived happily ever after."
OTHER_ENDINGS = paragraphs("""
    From that day on, {hero} and {friend} were the best of friends.

    {hero} went home, had some {goody}, and fell asleep with a smile.

    {hero} learned that it is good to [help others|share|be kind|be brave].

    That night, {hero} looked up at the stars and was happy.

    The end.
    """)


def tell_story(rng: random.Random, kind: str | None = None, episodes: int | None = None) -> str:
    """A story about a `kind` of hero in one to three episodes; what is not given is drawn from `rng`."""
    hero, friend = rng.sample(NAMES, 2)
    pronoun, possessive, object_ = ("he", "his", "him") if hero in HE_NAMES else ("she", "her", "her")
    kind = kind or rng.choice(HEROES)
    names = {
        "hero": hero,
        "kind": kind,
        "friend": friend,
        "friend_kind": rng.choice([other for other in HEROES if other != kind]),
        "place": rng.choice(PLACES),
        "thing": rng.choice(THINGS),
        "goody": rng.choice(GOODIES),
        "pronoun": pronoun,
        "Pronoun": pronoun.capitalize(),
        "possessive": possessive,
        "Possessive": possessive.capitalize(),
        "object": object_,
    }
    count = episodes or rng.choices([1, 2, 3], [1, 5, 1])[0]
    parts = [rng.choice(OPENINGS), rng.choice(FRIENDS), *rng.sample(TRAITS, rng.choice([0, 1, 1]))]
    parts.append(rng.choice(FIRST_EPISODES))
    for episode in rng.sample(LATER_EPISODES, count - 1):
        parts += [rng.choice(LINKS), episode]
    parts.append(USUAL_ENDING if rng.random() < 0.5 else rng.choice(OTHER_ENDINGS))
    chosen = re.sub(r"\[([^\]]*)\]", lambda match: rng.choice(match[1].split("|")), " ".join(parts))
    return chosen.format_map(names)
