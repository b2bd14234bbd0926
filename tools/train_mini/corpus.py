"""Texts and related pairs out of the sources that fetch.sh unpacked.

    python corpus.py WORK     reads WORK/x, writes WORK/corpus.jsonl.gz and WORK/corpus_counts.json

One line a record: {"s": source, "k": kind, "q": query, "d": document}, or {"s": source, "t": text} for a text on its
own. Everything is labelled by the teacher later, so what matters here is that texts are natural and that a pair's
document answers, defines or continues its query.
"""

from __future__ import annotations

import collections
import gzip
import html
import itertools
import json
import random
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_WORDS = 120
_SPACE = re.compile(r"\s+")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]?\s+(?=[\"'(A-Z])")
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', " ": " "})


def clean(text: str) -> str:
    return _SPACE.sub(" ", text.translate(_QUOTES)).strip()


def words(text: str) -> int:
    return text.count(" ") + 1


def prose(text: str) -> bool:
    """Mostly letters: tables, code and option lists are left out."""
    return (
        words(text) <= MAX_WORDS and len(text) <= 800 and sum(c.isalpha() or c == " " for c in text) >= 0.75 * len(text)
    )


def with_article(noun: str) -> str:
    return noun if noun[:1].isupper() or noun.endswith("s") else ("an " if noun[:1] in "aeiou" else "a ") + noun


class Corpus:
    """Collects records; `rng` is seeded per source, so that one source more or less changes no other."""

    def __init__(self, source: str) -> None:
        self.source, self.rng = source, random.Random(source)
        self.records: list[dict[str, str]] = []

    def text(self, text: str, least: int = 3) -> None:
        text = clean(text)
        if words(text) >= least and prose(text):
            self.records.append({"s": self.source, "t": text})

    def pair(self, query: str, document: str, kind: str) -> None:
        query, document = clean(query), clean(document)
        if query and query != document and words(document) >= 2 and prose(query) and prose(document):
            self.records.append({"s": self.source, "k": kind, "q": query, "d": document})

    def passages(self, paragraph: str) -> list[str]:
        """Whole sentences joined to passages of varied length."""
        found: list[str] = []
        current: list[str] = []
        length, limit = 0, self.rng.choice((12, 20, 40, 70, 100))
        for sentence in _SENTENCE.split(clean(paragraph)):
            size = words(sentence)
            if current and length + size > limit:
                found.append(" ".join(current))
                current, length, limit = [], 0, self.rng.choice((12, 20, 40, 70, 100))
            current.append(sentence)
            length += size
        found.append(" ".join(current))
        return [passage for passage in found if words(passage) >= 3 and prose(passage)]

    def paragraph(self, text: str, title: str | None = None) -> None:
        """A paragraph's passages, each paired with the next, the first with the title above it."""
        passages = self.passages(text)
        for passage in passages:
            self.text(passage)
        for a, b in itertools.pairwise(passages):
            self.pair(a, b, "next")
        if title and passages:
            self.pair(title, passages[0] if words(passages[0]) > 6 else " ".join(passages[:2]), "title")


# --- dictionaries ----------------------------------------------------------------------------------------------------


def wordnet(c: Corpus, root: Path) -> None:  # noqa: PLR0912
    folder = root / "usr/share/wordnet"
    used: collections.Counter[str] = collections.Counter()
    for line in (folder / "cntlist.rev").open():
        key, _, count = line.split()
        used[key.split("%")[0].replace("_", " ")] += int(count)
    synsets: dict[tuple[str, str], tuple[list[str], str, list[str], list[tuple[str, str]]]] = {}
    for pos in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{pos}").open(encoding="utf8"):
            if line.startswith("  "):
                continue
            data, gloss = line.split(" | ", 1)
            f = data.split()
            count = int(f[3], 16)
            lemmas = [re.sub(r"\(.*?\)$", "", f[4 + 2 * i]).replace("_", " ") for i in range(count)]
            at = 4 + 2 * count
            links = [f[at + 1 + 4 * i : at + 4 + 4 * i] for i in range(int(f[at]))]
            hypernyms = [(p[0] if (p := link[2]) != "s" else "a", link[1]) for link in links if link[0] in ("@", "@i")]
            examples = re.findall(r'"([^"]+)"', gloss)
            meaning = re.split(r';\s*"', gloss)[0].strip().rstrip(";")
            synsets[pos[0] if pos != "adv" else "r", f[0]] = (lemmas, meaning, examples, hypernyms)
    pick = c.rng.choice
    for (pos, _), (lemmas, meaning, examples, hypernyms) in synsets.items():
        above = [synsets[h][0][0] for h in hypernyms if h in synsets]
        w = pick(lemmas)
        for lemma in lemmas:
            c.pair(lemma, meaning if c.rng.random() < 0.5 else meaning[:1].upper() + meaning[1:] + ".", "term")
        for a, b in itertools.combinations(lemmas[:4], 2):
            c.pair(a, b + " " + above[0] if above and " " not in b else b, "synonym")
        if pos == "n":
            a = with_article(w)
            question = pick(_NOUN_QUESTIONS).format(a=a, w=w)
            kind = f"is {with_article(above[0])}: {meaning}" if above and c.rng.random() < 0.6 else f"means {meaning}"
            c.pair(question, f"{a[:1].upper() + a[1:]} {kind}.", "qa")
            if above and any(used[lemma.lower()] for lemma in lemmas):
                c.pair(pick(_KIND_QUESTIONS).format(above[0]), f"{w}, {meaning}", "kind")
        elif pos == "v":
            c.pair(pick(_VERB_QUESTIONS).format(re.sub(r"\(.*?\)", "", meaning).split(";")[0].strip()),
                   f"To {w} is to {meaning}.", "qa")  # fmt: skip
        else:
            c.pair(pick(_WORD_QUESTIONS).format(w), f"{w[:1].upper() + w[1:]}: {meaning}.", "qa")
        for example in examples:
            c.pair(f"{w}: {meaning}" if c.rng.random() < 0.5 else w, example, "example")
    common = sorted(((n, w) for w, n in used.items() if n > 1), reverse=True)
    for _, w in common:
        c.text(w, least=1)


_NOUN_QUESTIONS = [
    "what is {a}?",
    "what is {a}",
    "What is {a}?",
    "what's {a}",
    "{w} meaning",
    "define {w}",
    "what does {w} mean?",
    "tell me about {w}",
    "explain {w}",
    "Who or what is {a}?",
    "information about {w}",
    "what do you call {a}",
    "what is meant by {w}?",
    "{w}",
]
_KIND_QUESTIONS = ("example of {}", "a kind of {}", "type of {}", "what kinds of {} are there?", "which {} is it?")
_VERB_QUESTIONS = [
    "how do I {}?",
    "how to {}",
    "How can you {}?",
    "what does it mean to {}?",
    "which word means to {}?",
    "ways to {}",
    "I want to {}",
    "can I {}?",
    "is it hard to {}?",
    "tips to {}",
]
_WORD_QUESTIONS = ("what does {} mean?", "meaning of {}", "what is the meaning of {}", "describe something {}")


def dictd(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """(headword, entry) of a dictd database."""
    raw = gzip.decompress((folder / f"{name}.dict.dz").read_bytes())
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def number(text: str) -> int:
        value = 0
        for c in text:
            value = value * 64 + digits[c]
        return value

    seen = set()
    for line in (folder / f"{name}.index").open(encoding="utf8", errors="replace"):
        head, offset, size = line.rstrip("\n").split("\t")[:3]
        if not head.startswith("00") and (offset, size) not in seen:
            seen.add((offset, size))
            yield head, raw[number(offset) : number(offset) + number(size)].decode("utf8", "replace")


def dictionary(c: Corpus, root: Path) -> None:
    """foldoc, jargon, vera, elements: the headword, then paragraphs."""
    for head, entry in dictd(root / "usr/share/dictd", c.source):
        body = re.sub(r"[{}]", "", entry).partition("\n")[2].strip()
        body = re.sub(r"^\s*(\d\.\s*)?<[^>]*>", " ", body)
        body = re.sub(r"\(\d{4}-\d\d-\d\d\)", "", body)
        if c.source == "vera":
            c.pair(head.upper(), body, "term")
            continue
        for i, paragraph in enumerate(p for p in re.split(r"\n\s*\n", body) if p.strip()):
            passages = c.passages(paragraph)
            if i == 0 and passages:
                c.pair(head, passages[0], "term")
                c.pair(c.rng.choice(("what is {}?", "what does {} mean", "explain {}", "{}")).format(head),
                       " ".join(passages[:2]), "qa")  # fmt: skip
            c.paragraph(paragraph)


# --- manuals ---------------------------------------------------------------------------------------------------------

_DROP = re.compile(r"(?is)<(script|style|head|pre|screen|info|nav|table)\b.*?</\1>")
_BLOCK = re.compile(r"(?is)<(h[1-6]|title|p|dd|li)\b[^>]*>(.*?)(?=</\1>|<(?:h[1-6]|title|p|dd|li|ul|dl)\b)")


def markup(c: Corpus, files: Iterable[Path]) -> None:
    """HTML or Mallard pages: headings are the titles of the paragraphs below them."""
    for file in sorted(files):
        page, title = _DROP.sub(" ", file.read_text(encoding="utf8", errors="replace")), None
        for match in _BLOCK.finditer(page):
            text = clean(html.unescape(re.sub(r"<[^>]+>", " ", match[2])).replace("¶", " ").replace("§", " "))
            text = re.sub(r" ([.,;:!?)])", r"\1", re.sub(r"^[\dA-Z]{1,2}(\.\d+)*\.?\s+(?=[A-Z])", "", text))
            if match[1].lower()[0] in "ht":
                title = text if 2 <= words(text) <= 15 else None
            elif words(text) >= 5:
                c.paragraph(text, title)
                title = None


def pages(pattern: str) -> Any:
    return lambda c, root: markup(c, (f for f in root.glob(pattern) if f.is_file()))


def rust(c: Corpus, root: Path) -> None:
    books = ("book", "rust-by-example", "cargo", "nomicon", "reference", "edition-guide", "embedded-book", "rustc")
    markup(c, (f for book in books for f in (root / "usr/share/doc/rust-doc/html" / book).rglob("*.html")))


def perl(c: Corpus, root: Path) -> None:
    for file in sorted(root.rglob("*.pod")):
        title = None
        for block in re.split(r"\n\s*\n", file.read_text(encoding="utf8", errors="replace")):
            text = re.sub(r"[A-Z]<+\s?([^<>]*?)\s?>+", r"\1", block)
            if block.startswith(("=head", "=item")):
                heading = clean(re.sub(r"^=\w+\s*", "", text))
                title = heading if 2 <= words(heading) <= 15 else None
            elif block[:1].isalpha():
                c.paragraph(text, title)
                title = None


# --- prose -----------------------------------------------------------------------------------------------------------


def r_strings(file: Path) -> Iterator[str]:
    """The character strings of an R data file: zlib blocks of CHARSXP records."""
    data = file.read_bytes()
    for match in re.finditer(rb"x[\x01\x5e\x9c\xda]", data):
        try:
            block = zlib.decompressobj().decompress(data[match.start() :])
        except zlib.error:
            continue
        at = 0
        while (at := block.find(b"\x00\x04\x00\x09", at)) >= 0:
            size = int.from_bytes(block[at + 4 : at + 8], "big")
            at += 8
            if size < 5000:
                yield block[at : at + size].decode("utf8", "replace")


def novels(c: Corpus, root: Path) -> None:
    lines: list[str] = []
    for file in sorted([*root.rglob("data/*.rdb"), *root.rglob("R/sysdata.rdb")]):
        for line in [*r_strings(file), ""]:
            if line.strip():
                lines.append(line)
            elif lines:
                c.paragraph(" ".join(lines))
                lines = []


def webible(c: Corpus, root: Path) -> None:
    """SWORD zText: an index of compressed blocks (.bzs), one of verses inside them (.bzv), the blocks (.bzz)."""
    for part in ("ot", "nt"):
        stem = next(root.rglob(f"{part}.bzz")).with_suffix("")
        index, verses, data = ((stem.with_suffix(s)).read_bytes() for s in (".bzs", ".bzv", ".bzz"))
        blocks: dict[int, bytes] = {}
        chapter: list[str] = []
        for at in range(0, len(verses), 10):
            number = int.from_bytes(verses[at : at + 4], "little")
            start, size = (
                int.from_bytes(verses[at + 4 : at + 8], "little"),
                int.from_bytes(verses[at + 8 : at + 10], "little"),
            )
            if number not in blocks:
                o, n = (int.from_bytes(index[12 * number + k : 12 * number + k + 4], "little") for k in (0, 4))
                blocks[number] = zlib.decompress(data[o : o + n]) if n else b""
            verse = blocks[number][start : start + size].decode("utf8", "replace")
            verse = re.sub(r"(?s)<(note|title)\b.*?</\1>", " ", verse)
            verse = clean(html.unescape(re.sub(r"<[^>]+>", " ", verse)))
            if verse:
                chapter.append(re.sub(r" ([.,;:!?])", r"\1", verse))
            if len(chapter) == 12:
                c.paragraph(" ".join(chapter))
                chapter = []


def quiz(c: Corpus, root: Path) -> None:
    folder = root / "usr/share/games/bsdgames/quiz"

    def lines(name: str) -> Iterator[list[str]]:
        for line in (folder / name).read_text(encoding="latin1").replace("\\\n", "").splitlines():
            yield [re.sub(r"\[([^]|]*)[^]]*\]", r"\1", re.sub(r"[{}]", "", part)).strip() for part in line.split(":")]

    for young, adults in lines("babies"):
        for adult in adults.split("|"):
            c.pair(f"what is a baby {adult} called?", f"A young {adult} is called a {young}.", "qa")
            c.pair(f"what does a {young} grow into?", f"The {young} grows up to be a {adult}.", "qa")
    for many, names in lines("collectives"):
        for animal, name in itertools.product(many.split("|"), names.split("|")):
            c.pair(
                f"what do you call a group of {animal}?", f"A group of {animal} is called a {name} of {animal}.", "qa"
            )
    for flower, meaning in lines("flowers"):
        c.pair(f"what does the flower {flower} stand for?", f"{flower}: in the language of flowers, {meaning}.", "qa")
    for name in ("europe", "asia", "africa", "america"):
        for country, capital in lines(name):
            names = country.split("|")[0], capital.split("|")[0]
            c.pair("what is the capital of {}?".format(*names), "{1} is the capital of {0}.".format(*names), "qa")
    for fields in lines("state"):
        state, capital, flower = fields[0].split("|")[0], fields[1].split("|")[0], fields[3].split("|")[0]
        c.pair(f"capital of the state of {state}", f"{capital} is the capital city of {state}.", "qa")
        c.pair(f"state flower of {state}", f"The state flower of {state} is the {flower}.", "qa")


# --- talk, household, countries, emoji -------------------------------------------------------------------------------


def chatterbot(c: Corpus, root: Path) -> None:
    for file in sorted(root.glob("chatterbot_corpus/data/english/*.yml")):
        talk: list[str] = []
        for line in [*file.read_text(encoding="utf8").splitlines(), "- - end"]:
            match = re.match(r"\s*(-\s+)(-\s+)?(.*)", line)
            if not match:
                continue
            if match[2]:
                for question, answer in itertools.pairwise(talk):
                    c.pair(question, answer, "qa")
                talk = []
            talk.append(match[3].strip("'\" "))


_SLOTS = {
    name: values.split(", ")
    for name, values in (
        ("area", "kitchen, living room, bedroom, bathroom, garage, hallway, office, garden, attic, basement, nursery"),
        ("floor", "first floor, ground floor, upstairs, downstairs"),
        (
            "name",
            "lamp, heater, ceiling fan, washing machine, TV, front door, curtains, thermostat, coffee maker, radio",
        ),
        ("item", "milk, apples, bread, batteries, shampoo, toilet paper, eggs, cheese, dog food, light bulbs, rice"),
        ("message", "dinner is ready, we are leaving, time for school, the guests are here, please come down"),
        ("search_query", "jazz, some rock music, bedtime stories, the news, love songs, birdsong"),
        ("color", "red, blue, warm white, green, purple"),
        ("state", "on, off, open, closed, locked, wet, empty"),
    )
}


def intents(c: Corpus, root: Path) -> None:
    """Sentence templates: (a|b) alternatives, [x] optional, {slot} values, <rule> expansions."""
    data = json.loads((root / "home_assistant_intents/data/en.json").read_text())
    rules = data["expansion_rules"]

    def slot(match: re.Match[str]) -> str:
        name = match[1].split(":")[-1]
        known = next((values for key, values in _SLOTS.items() if key in name), None)
        return c.rng.choice(known) if known else str(c.rng.randint(2, 60))

    def fill(template: str) -> str:
        for _ in range(40):
            before = template
            template = re.sub(r"<(\w+)>", lambda m: rules.get(m[1], ""), template)
            template = re.sub(
                r"\[([^][()<>]*)\]", lambda m: c.rng.choice(("", c.rng.choice(m[1].split("|")))), template
            )
            template = re.sub(r"\(([^][()<>]*)\)", lambda m: c.rng.choice(m[1].split("|")), template)
            if template == before:
                break
        return re.sub(r"\{([^}]*)\}", slot, template)

    for intent in data["intents"].values():
        for block in intent["data"]:
            for sentence in block["sentences"]:
                for _ in range(8):
                    c.pair(fill(sentence), fill(sentence), "same")


def homeassistant(c: Corpus, root: Path) -> None:
    def walk(node: dict[str, Any], titles: list[str]) -> None:
        label = node.get("title") or node.get("name")
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, [*titles, label] if isinstance(label, str) else titles)
            elif isinstance(value, str):
                text = re.sub(r"\[%.*?%\]|\{\w+\}|[*`_]|https?:\S+", "", value)
                if key == "description" and label:
                    c.pair(label, text, "title")
                elif words(clean(text)) >= 3:
                    c.paragraph(text)

    for file in sorted(root.glob("homeassistant/components/*/strings.json")):
        walk(json.loads(file.read_text(encoding="utf8")), [])


def factbook(c: Corpus, root: Path) -> None:
    ask = ("{f} of {n}", "{n} {f}", "what is the {f} of {n}?", "tell me about the {f} in {n}", "{n}: {f}")
    for file in sorted((root / "package").glob("*/*.json")):
        if file.parent.name == "meta":
            continue
        country = json.loads(file.read_text(encoding="utf8"))
        names = country.get("Government", {}).get("Country name", {})
        name = names.get("conventional short form", {}).get("text", "")
        name = re.split(r"[;<(]", name)[0].strip()
        if not name or name == "none":
            continue
        for section in country.values():
            for field, value in section.items():
                parts = [(key, sub["text"]) for key, sub in value.items() if isinstance(sub, dict) and "text" in sub]
                texts = [value["text"]] if "text" in value else [f"{key}: {text}" for key, text in parts]
                for text in texts:
                    body = c.passages(re.sub(r"<[^>]+>", " ", text))[:3]
                    if body:
                        subject = re.sub(r" - .*", "", field).lower()
                        c.pair(c.rng.choice(ask).format(f=subject, n=name), f"{name}, {subject}: {body[0]}", "qa")
                        for passage in body:
                            c.text(passage)


def cldr(c: Corpus, root: Path) -> None:
    file = root / "package/annotations/en/annotations.json"
    for entry in json.loads(file.read_text(encoding="utf8"))["annotations"]["annotations"].values():
        keywords, name = entry.get("default", []), entry.get("tts", [""])[0]
        if keywords and re.fullmatch(r"[\w ,.:'-]+", name):
            c.pair(name, ", ".join(keywords), "term")
            c.pair(" ".join(c.rng.sample(keywords, min(3, len(keywords)))), name, "synonym")


READERS: dict[str, Any] = {
    "wordnet": wordnet,
    "elements": dictionary, "foldoc": dictionary, "jargon": dictionary, "vera": dictionary,
    "janeausten": novels, "webible": webible, "quiz": quiz,
    "python": pages("**/html/**/*.html"), "perl": perl, "postgresql": pages("**/*.html"), "rust": rust,
    "django": pages("**/*.html"), "sqlite": pages("**/*.html"), "nodejs": pages("**/api/*.html"),
    "apache": pages("**/en/**/*.html"), "libreoffice": pages("**/*.html"), "gnome": pages("usr/share/help/C/**/*.page"),
    "handbook": pages("usr/share/doc/debian-handbook/html/en-US/*.html"),
    "chatterbot": chatterbot, "intents": intents, "homeassistant": homeassistant, "factbook": factbook, "cldr": cldr,
}  # fmt: skip


def main() -> None:
    work = Path(sys.argv[1])
    counts: dict[str, dict[str, int]] = {}
    with gzip.open(work / "corpus.jsonl.gz", "wt", encoding="utf8", compresslevel=4) as out:
        for name, reader in READERS.items():
            c = Corpus(name)
            reader(c, work / "x" / name)
            unique = dict.fromkeys(json.dumps(record, ensure_ascii=False) for record in c.records)
            out.writelines(line + "\n" for line in unique)
            counts[name] = dict(collections.Counter(r.get("k", "text") for r in c.records))
            print(name, counts[name], flush=True)
    (work / "corpus_counts.json").write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
