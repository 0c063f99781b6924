"""Prompts for training a draft head where no data set is at hand: kinds of questions times subjects, as JSON lines.

    python benchmarks/draft_prompts.py --count 8000 -o prompts.jsonl --held-out held-out.jsonl

Prompts held out use other words and other subjects than those to train on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

THINGS = """
photosynthesis; gravity; inflation; the water cycle; plate tectonics; black holes; vaccines; the stock market; DNA;
antibiotics; electric motors; solar panels; batteries; the immune system; volcanoes; tides; rainbows; glaciers; coral
reefs; earthquakes; evolution; the greenhouse effect; nuclear fusion; magnetism; sound waves; lightning; the solar
system; comets; the Milky Way; fermentation; yeast; bread baking; cheese making; coffee roasting; chocolate; honey bees;
butterflies; migration of birds; octopuses; whales; sharks; wolves; elephants; penguins; bats; spiders; ants; dinosaurs;
mammoths; forests; deserts; oceans; rivers; mountains; the Moon; Mars; telescopes; microscopes; thermometers; clocks;
calendars; maps; compasses; bridges; skyscrapers; tunnels; railways; bicycles; airplanes; sailing ships; submarines;
rockets; satellites; radios; telephones; the printing press; paper; glass; concrete; steel; plastic; cotton; silk;
democracy; constitutions; taxes; interest rates; insurance; supply and demand; trade; money; banks; contracts; patents;
copyright; privacy; encryption; passwords; the internet; search engines; databases; operating systems; compilers;
version control; unit tests; recursion; sorting algorithms; hash tables; linked lists; binary search; neural networks;
machine learning; language models; robots; self-driving cars; 3D printing; virtual reality; video games; chess;
football; basketball; tennis; swimming; running; yoga; meditation; sleep; dreams; memory; habits; motivation; stress;
anxiety; happiness; friendship; empathy; leadership; teamwork; negotiation; public speaking; time management; budgeting;
saving money; investing; nutrition; vitamins; protein; hydration; exercise; first aid; gardening; composting; recycling;
renewable energy; wind turbines; climate change; biodiversity; extinction; agriculture; irrigation; fishing; forestry;
jazz; opera; painting; sculpture; photography; film making; poetry; novels; theatre; dance; architecture; fashion;
philosophy; ethics; logic; probability; statistics; algebra; geometry; calculus; prime numbers; fractions; percentages;
the Roman Empire; ancient Egypt; the Renaissance; the Industrial Revolution; the Silk Road; the Middle Ages
"""
ROLES = """
teacher; nurse; software engineer; farmer; chef; pilot; librarian; carpenter; journalist; lawyer; photographer;
student; parent of two; retired sailor; small shop owner; project manager; data analyst; electrician; musician;
firefighter; bus driver; veterinarian; gardener; translator; architect
"""
TASKS = """
sort a list of numbers; reverse a string; count the words in a text; check whether a number is prime; compute the
factorial of a number; find the largest number in a list; remove duplicates from a list; read a CSV file; write a
dictionary to a JSON file; merge two sorted lists; compute the average of a list; check whether a word is a palindrome;
count the vowels in a string; convert Celsius to Fahrenheit; generate random passwords; compute Fibonacci numbers;
flatten a nested list; group words by their first letter; find common elements of two lists; parse a date; download a
web page; rename all files in a folder; validate an email address; compute the greatest common divisor; transpose a
matrix; count how often each character occurs; implement a stack; implement a queue; compute compound interest; draw a
multiplication table
"""
OCCASIONS = """
a job interview; a first day at work; a birthday party; a wedding; a long flight; moving to a new city; a camping trip;
a school exam; a marathon; a rainy weekend; a family dinner; a business trip; a garden project; a car journey with
children; a visit to a museum; learning the guitar; adopting a dog; starting a small company; a difficult conversation;
a power cut; a picnic; a science fair; a charity event; a house renovation; a language course
"""
FIGURES = """
a lonely lighthouse keeper; a talking fox; a robot that learns to paint; two sisters who find a map; a dragon afraid of
fire; an old clockmaker; a girl who speaks with trees; a lost astronaut; a baker with a secret; a cat that runs a shop;
a boy and his paper boat; a detective in a snowstorm; a wizard without magic; a whale that sings at night; a village
that has no mirrors; a time traveller who is always late; a queen who wants to be a farmer; an orchestra of mice; a
train that never stops; a child who collects shadows
"""
SENTENCES = """
The meeting was moved to Thursday because the manager is ill.; Our new phone has a larger screen and a better battery.;
She walked home in the rain and thought about the letter.; The results of the study were surprising to everyone.;
Please send the documents before the end of the week.; The restaurant was crowded, but the food was worth the wait.;
He has worked here for ten years and knows every customer.; The children built a castle of sand near the water.;
This update fixes a problem that made the program slow.; The museum is closed on Mondays and on public holidays.;
I am sorry for the delay and will call you tomorrow.; The train to the coast leaves every hour from platform four.;
We need more volunteers for the event on Saturday.; The old bridge was repaired after the flood of last spring.;
Many people prefer to work from home at least two days a week.; The price of coffee has doubled in the last year.
"""

KINDS: list[tuple[str, tuple[str, ...]]] = [
    ("Explain {thing} in simple terms.", ("thing",)),
    ("What is {thing}?", ("thing",)),
    ("Why does {thing} matter?", ("thing",)),
    ("How does {thing} work?", ("thing",)),
    ("Give me five facts about {thing}.", ("thing",)),
    ("Write a short paragraph about {thing}.", ("thing",)),
    ("Describe {thing} to a ten-year-old child.", ("thing",)),
    ("What are the advantages and disadvantages of {thing}?", ("thing",)),
    ("Write a poem about {thing}.", ("thing",)),
    ("Summarize the history of {thing} in a few sentences.", ("thing",)),
    ("List three common mistakes people make about {thing}.", ("thing",)),
    ("Write a quiz with four questions about {thing}, with answers.", ("thing",)),
    ("What should a beginner know about {thing}?", ("thing",)),
    ("Write an introduction to an essay about {thing}.", ("thing",)),
    ("Tell me something surprising about {thing}.", ("thing",)),
    ("I have to give a talk about {thing}. Make an outline.", ("thing",)),
    ("Compare {thing} and {other}.", ("thing", "other")),
    ("How are {thing} and {other} related?", ("thing", "other")),
    ("Which is more important for society, {thing} or {other}? Give reasons.", ("thing", "other")),
    ("I am a {role}. What should I know about {thing}?", ("role", "thing")),
    ("How could a {role} use {thing} at work?", ("role", "thing")),
    ("Write a dialogue between a {role} and a customer about {thing}.", ("role", "thing")),
    ("Describe a typical day of a {role}.", ("role",)),
    ("What skills does a {role} need?", ("role",)),
    ("Write a Python function to {task}.", ("task",)),
    ("Show me how to {task} in JavaScript.", ("task",)),
    ("Explain step by step how a program can {task}.", ("task",)),
    ("How do I {task} in Python? Give an example and explain it.", ("task",)),
    ("Write a unit test for a function that should {task}.", ("task",)),
    ("Give me a checklist for {occasion}.", ("occasion",)),
    ("Write an email to a friend about {occasion}.", ("occasion",)),
    ("What are five tips for {occasion}?", ("occasion",)),
    ("Plan {occasion} for a {role} with a small budget.", ("occasion", "role")),
    ("Write a short story about {figure}.", ("figure",)),
    ("Begin a fairy tale about {figure}, set in a place known for {thing}.", ("figure", "thing")),
    ("Write a dialogue between {figure} and a {role}.", ("figure", "role")),
    ("Rewrite this sentence in a more formal tone: {sentence}", ("sentence",)),
    ("Translate into French: {sentence}", ("sentence",)),
    ("Make this sentence shorter: {sentence}", ("sentence",)),
    ("What is the tone of this sentence? {sentence}", ("sentence",)),
    ("Continue this text: {sentence}", ("sentence",)),
    ("A shop sells {number} boxes with {small} pens each. How many pens are there in all?", ("number", "small")),
    ("If I drive {number} kilometres in {small} hours, what is my average speed?", ("number", "small")),
    ("What is {number} times {small}? Show the steps.", ("number", "small")),
    ("I save {number} dollars a month. How much do I have after {small} years?", ("number", "small")),
]
HELD_OUT_KINDS: list[tuple[str, tuple[str, ...]]] = [
    ("Could you help me understand {thing}?", ("thing",)),
    ("Tell me about {thing}.", ("thing",)),
    ("What would the world be like without {thing}?", ("thing",)),
    ("Write a newspaper article about {thing}.", ("thing",)),
    ("What questions would a {role} ask about {thing}?", ("role", "thing")),
    ("Write code that can {task}, with comments.", ("task",)),
    ("How should I prepare for {occasion}?", ("occasion",)),
    ("Invent a legend about {figure}.", ("figure",)),
    ("Correct this text if needed, and say what you changed: {sentence}", ("sentence",)),
    ("I bought {small} tickets for {number} dollars in all. What did one ticket cost?", ("number", "small")),
]


def _listed(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.replace(".;", ".\0").replace(";", "\0").split("\0") if each.strip()]


def subjects(held_out: bool) -> dict[str, list[str]]:
    """Words for each place of a prompt: every tenth of each list is held out."""
    lists = {
        "thing": _listed(THINGS), "role": _listed(ROLES), "task": _listed(TASKS), "occasion": _listed(OCCASIONS),
        "figure": _listed(FIGURES), "sentence": _listed(SENTENCES), "number": [str(n) for n in range(12, 480, 7)],
        "small": [str(n) for n in range(3, 19)],
    }  # fmt: skip
    chosen = {
        name: [each for i, each in enumerate(words) if (i % 10 == 7) == held_out] for name, words in lists.items()
    }
    chosen["other"] = chosen["thing"]
    return chosen


def prompts(count: int, held_out: bool = False, seed: int = 0) -> Iterator[str]:
    """Distinct prompts, as many of each kind as there are, in random order."""
    rng, words = random.Random(seed), subjects(held_out)
    queues = []
    for text, names in HELD_OUT_KINDS if held_out else KINDS:
        made = [
            text.format(**dict(zip(names, each, strict=True)))
            for each in itertools.product(*(words[name] for name in names))
            if len(set(each)) == len(each)
        ]
        rng.shuffle(made)
        queues.append(made)
    found: list[str] = []
    while len(found) < count and any(queues):
        found += [queue.pop() for queue in queues if queue]
    rng.shuffle(found := found[:count])
    return iter(found)


def write(path: Path, made: Iterator[str]) -> int:
    """Write them as chats of one message; returns how many."""
    lines = [json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in made]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, help="file for 200 prompts to measure with")
    args = parser.parse_args()
    print(write(args.output, prompts(args.count)), "prompts in", args.output)
    if args.held_out is not None:
        print(write(args.held_out, prompts(200, held_out=True)), "prompts in", args.held_out)


if __name__ == "__main__":
    main()
