"""Common words by kind: WordNet's lemmas that a small spelling dictionary (SCOWL up to size 50) knows too."""

from __future__ import annotations

import collections
from pathlib import Path

# The numbers of WordNet's lexicographer files (lexnames(5WN)) that hold things one can touch or feel.
_FILES = {
    "05": "animal",
    "06": "artifact",
    "08": "body",
    "13": "food",
    "18": "person",
    "20": "plant",
    "27": "substance",
}


def common_words(sources: Path) -> dict[str, list[str]]:
    """{"food": [...], ..., "noun": [...], "verb": [...], "adj": [...]}, sorted; a word is in every list it fits.

    A noun counts as a kind of thing by its first, most frequent sense.
    """
    known = {
        word
        for file in (sources / "scowl/usr/share/dict/scowl").glob("*words.[1-5][05]")
        for word in file.read_text(encoding="latin1").split()
        if file.name.split(".")[0] in ("english-words", "american-words") and word.isascii()
    }
    folder = sources / "wordnet/usr/share/wordnet"
    used: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in (folder / "cntlist.rev").open():
        key, _, count = line.split()
        word, sense = key.split("%")
        used[word, sense[0]] += int(count)
    lists: dict[str, set[str]] = collections.defaultdict(set)
    for numbers, pos in (("1", "noun"), ("2", "verb"), ("35", "adj")):
        lists[pos] = {w for (w, p), n in used.items() if p in numbers and n >= 2 and w in known and len(w) > 2}
    kind_of = {}
    for line in (folder / "data.noun").open(encoding="utf8"):
        if not line.startswith("  "):
            offset, number = line.split(" ", 2)[:2]
            kind_of[offset] = _FILES.get(number)
    for line in (folder / "index.noun").open(encoding="utf8"):
        if not line.startswith("  "):
            fields = line.split()
            first_sense = fields[-int(fields[2])]
            if fields[0] in known and len(fields[0]) > 2 and (kind := kind_of[first_sense]):
                lists[kind].add(fields[0])
    return {kind: sorted(found) for kind, found in sorted(lists.items())}
