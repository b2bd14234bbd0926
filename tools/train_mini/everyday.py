"""Questions of daily life and the statements that answer them, composed from the grammars in everyday.txt.

A frame's slots are filled once for a question and its answers, so that both speak of the same things; what is true
matters less than what is about what, since the teacher judges every text. Single words come from everyday.txt and,
for variety, from WordNet's nouns of the same kind that are common enough for a small spelling dictionary.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

Pair = tuple[str, str, str]
"""(text, text, kind): "answer" for a question and its answer, "same" for two ways to ask."""

GRAMMAR = Path(__file__).with_name("everyday.txt")
_SLOT = re.compile(r"\{([a-z]+)(\d?)\}")
_CHOICE = re.compile(r"\(([^()\[\]]*)\)")
_OPTION = re.compile(r"\[([^()\[\]]*)\]")

# WordNet's lexicographer files that widen a word list.
_WIDENED = {"food": "food", "animal": "animal", "plant": "plant", "bodypart": "body", "job": "person", "feeling": "adj"}

_BEFORE = ("hi, ", "hello, ", "quick question: ", "question: ", "please help, ", "sorry to ask, but ", "hey, ")
_HOWTO = """how do I {}?;how to {};how can I {}?;how do you {}?;what is the (best|right|easiest) way to {}?;
{} step by step;I (want|need|have) to {};(tips|instructions|advice) to {};how should I {}?;I don't know how to {};
can you (explain|show me) how to {}?;what do I have to do to {}?""".replace("\n", "").split(";")
_STEPS = (
    "To {t}, {a}, {b} and {c}.", "First {a}. Then {b}. Finally {c}.", "{A}. {B}. {C}.", "{A}, then {b}, then {c}.",
    "If you want to {t}, {a} and {b}; {c}.", "How to {t}: {a}, {b}, {c}.", "{A} and {b}.",
    "When you {t}, {a}, and {c}.",
)  # fmt: skip
_TROUBLE = """why {do} my {o} {v}?;my {o} {vs}[, what (can|should) I do]?;how do I (stop|keep) my {o} from {ving}?;
what can I do when my {o} {vs}?;what does it mean when (the|my) {o} {vs}?;{o} {vs};my {o} {vs} again;{o} {ving};
what to do about a {o} that {vs};help, my {o} {vs};is it normal that (the|my) {o} {vs}?;how to fix {o} that {vs};
what causes (the|a) {o} to {v}?""".replace("\n", "").split(";")
_CURE = (
    "If the {o} {vs}, {c}; {r}.", "{R} if your {o} {vs}.", "The {o} {vs} because {c}. {R}.", "{C}, so the {o} {vs}.",
    "Does your {o} {v}? Often {c}. {R}.", "When the {o} {vs}, {r}.", "{R}.", "{C}: {r}.",
)  # fmt: skip

# Any words at all in ordinary sentences: they teach how meanings combine, not facts.
_ANY = """how do I {v} a {e}?|how to {v} {n}|how to {v} the {e} without a {m}|best {e} for {m}|why is my {e} {a}?|
what is the best {e} for a {a} {m}?|why does the {e} {v}?|where can I find a {a} {e}|can I {v} a {e} with a {m}?|
{a} {e}|{e} {m}|{e} and {m}|difference between {e} and {m}|when should I {v} my {e}?|is {e} good for {m}?|
how much {e} do I need?|how many {e} in a {m}|what does {e} do to {m}|what happens if you {v} the {e}?|
the {a} {e} in the {m}|who can {v} my {e}|which {e} is {a}?|My {e} is {a} and I need a {m}.|what is a {e} for?|
You should {v} the {e} before the {m} becomes {a}.|The {n} must {v} the {e} every day.|where do I put the {e}?|
They {v} the {a} {e} near the {m}.|Please {v} the {e} in the {m}.|She wanted to {v} a {a} {e} for her {m}.|
He could not {v} the {e} because the {m} was {a}.|tips for {a} {e}|what causes {a} {e}|cheap {e} near {m}|{v} {e}|
treatment for {a} {e}|how long does {e} take to {v}|how often should you {v} {e}|a {e} made of {m}|
Put the {e} on the {m} and {v} it until it is {a}.|First {v} the {e}, then {w} the {m} with a {n}.|
do I need a {e} to {v} a {m}|my {m} won't {v}|is it safe to {v} a {e} with {m}|A {e} that you {v} is {a}.|
The {a} {m} helps people {v} their {e}.|{n} of the {e}: {v}, {w}, and {m}|I am looking for a {a} {e}.""".replace(
    "\n", ""
).split("|")


class Everyday:
    """The grammars, ready to draw from. `common` holds common words by kind: WordNet's lexicographer files of nouns,
    and "noun", "verb", "adj"."""

    def __init__(self, common: Mapping[str, Sequence[str]], seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.common = common
        self.lists: dict[str, list[str]] = {}
        self.frames: list[tuple[list[str], list[str]]] = []
        self.problems: list[list[str]] = []
        self.tasks: list[list[str]] = []
        self.facts: list[list[str]] = []
        rows = {"problem": self.problems, "howto": self.tasks, "fact": self.facts}
        section, name = "", ""
        for line in GRAMMAR.read_text(encoding="utf8").splitlines():
            if match := re.fullmatch(r"\[(\w+) ?(\w*)\]", line):
                section, name = match.groups()
                if section == "frame":
                    self.frames.append(([], []))
            elif not line or line.startswith("#"):
                continue
            elif section == "list":
                self.lists[name] = line.split("|")
            elif section == "frame":
                self.frames[-1][line[0] == "="].append(line[2:])
            else:
                rows[section].append(line.split(" ; "))
        self._drawers = ((0.74, self.frame), (0.05, self.problem), (0.05, self.task), (0.02, self.fact))

    def pick(self, items: Sequence[str]) -> str:
        return items[int(self.rng.random() * len(items))]

    def word(self, name: str) -> str:
        wider = self.common.get(_WIDENED.get(name, ""), ())
        return self.pick(wider) if wider and self.rng.random() < 0.3 else self.pick(self.lists[name])

    def choose(self, template: str) -> str:
        """Settle every (a|b) and [x], innermost first."""
        while True:
            chosen = _CHOICE.sub(lambda m: self.pick(m[1].split("|")), template)
            chosen = _OPTION.sub(lambda m: m[1] if self.rng.random() < 0.4 else "", chosen)
            if chosen == template:
                return chosen
            template = chosen

    def fill(self, template: str, bound: dict[str, str]) -> str:
        def value(match: re.Match[str]) -> str:
            if match[0] not in bound:
                bound[match[0]] = self.word(match[1])
            return bound[match[0]]

        return re.sub(r"\s+", " ", _SLOT.sub(value, self.choose(template))).strip()

    def question(self, text: str) -> str:
        """As people type it: with or without a greeting, capital letter and question mark."""
        if self.rng.random() < 0.08:
            text = self.pick(_BEFORE) + text
        if self.rng.random() < 0.3:
            text = text.rstrip("?")
        return text[:1].upper() + text[1:] if self.rng.random() < 0.5 else text

    def frame(self) -> Iterator[Pair]:
        asks, says = self.frames[int(self.rng.random() * len(self.frames))]
        bound: dict[str, str] = {}
        question = self.fill(self.pick(asks), bound)
        count = 1 + (self.rng.random() < 0.3) + (self.rng.random() < 0.15)
        answers = [self.fill(self.pick(says), bound) for _ in range(count)]
        answer = " ".join(dict.fromkeys(a[:1].upper() + a[1:] for a in answers))
        yield self.question(question), answer, "answer"
        draw = self.rng.random()
        if draw < 0.2:
            yield self.question(question), self.question(self.fill(self.pick(asks), bound)), "same"
        elif draw < 0.4:
            yield _keywords(question), answer, "answer"

    def problem(self) -> Iterator[Pair]:
        o, v, cause, remedy = self.pick(self.problems)  # type: ignore[arg-type]
        plural = o.endswith("s") and not o.endswith("ss")
        do = "do" if plural else "does"
        first, _, rest = v.partition(" ")
        says = f"{do} {v}" if first == "not" else v if plural else f"{_third(first)} {rest}".strip()
        doing = (
            f"not {_ing(rest.split(' ')[0])} {rest.partition(' ')[2]}" if first == "not" else f"{_ing(first)} {rest}"
        )
        values = {"o": o, "v": v, "vs": says, "ving": doing.strip(), "do": do, "c": cause, "r": remedy}
        values |= {"C": _capital(cause), "R": _capital(remedy)}
        asks = [self.question(self.choose(self.pick(_TROUBLE)).format(**values)) for _ in range(2)]
        yield asks[0], self.choose(self.pick(_CURE)).format(**values), "answer"
        yield asks[0], asks[1], "same"

    def task(self) -> Iterator[Pair]:
        t, *steps = self.pick(self.tasks)  # type: ignore[misc]
        values = dict(zip("abc", steps, strict=True)) | dict(zip("ABC", map(_capital, steps), strict=True))
        asks = [self.question(self.choose(self.pick(_HOWTO)).format(t)) for _ in range(2)]
        yield asks[0], self.pick(_STEPS).format(t=t, **values), "answer"
        yield asks[0], asks[1], "same"

    def fact(self) -> Iterator[Pair]:
        question, answer = self.pick(self.facts)  # type: ignore[misc]
        yield self.question(self.choose(question) + "?"), answer, "answer"

    def pairs(self) -> Iterator[Pair]:
        """Endless pairs: frames, problems, tasks and facts in turn, by weight."""
        total = sum(weight for weight, _ in self._drawers)
        while True:
            draw = self.rng.random() * total
            for weight, drawer in self._drawers:
                draw -= weight
                if draw < 0:
                    yield from drawer()
                    break

    def any_words(self) -> str:
        common, pick = self.common, self.pick
        concrete = pick(("artifact", "food", "animal", "plant", "body", "substance", "noun", "noun"))
        return pick(_ANY).format(
            e=pick(common[concrete]), n=pick(common["noun"]), m=pick(common["noun"]), v=pick(common["verb"]),
            w=pick(common["verb"]), a=pick(common["adj"]))  # fmt: skip


_STOP = frozenset(
    [
        "how",
        "do",
        "does",
        "did",
        "i",
        "you",
        "my",
        "the",
        "a",
        "an",
        "to",
        "is",
        "are",
        "what",
        "why",
        "when",
        "where",
        "which",
        "can",
        "should",
        "could",
        "would",
        "will",
        "be",
        "in",
        "on",
        "of",
        "for",
        "it",
        "and",
        "or",
        "with",
        "if",
        "me",
        "we",
        "he",
        "she",
        "they",
        "this",
        "that",
        "there",
        "have",
        "has",
        "had",
        "am",
        "so",
        "not",
        "at",
        "by",
        "from",
        "your",
    ]
)


def _keywords(question: str) -> str:
    kept = [w for w in re.findall(r"[\w'-]+", question.lower()) if w not in _STOP]
    return " ".join(kept) or question


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _third(verb: str) -> str:
    """walk → walks, for the verbs of everyday.txt."""
    if verb in ("be", "have"):
        return {"be": "is", "have": "has"}[verb]
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")


def _ing(verb: str) -> str:
    """walk → walking, take → taking, stop → stopping."""
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    if verb.endswith("e") and verb not in ("be", "see"):
        return verb[:-1] + "ing"
    if re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", verb):
        return verb + verb[-1] + "ing"
    return verb + "ing"
