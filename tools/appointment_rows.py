"""Write the chats of examples/quickstart.yaml: a message, and the appointment in it as JSON.

uv run python -m tools.appointment_rows            write both files
uv run python -m tools.appointment_rows --check    exit 1 if a file differs

The held-out chats have names, places, times, events and sentences that no training chat has. A
model that memorizes the training chats fails on them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT

FOLDER = ROOT / "examples" / "data"
SYSTEM = (
    "Write the appointment in the message as JSON with the keys event, person, day, time and place."
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class Words:
    """The words of one file: the parts of a message, and its sentences.

    Attributes:
        sentences: Templates with the keys of the appointment.
        count: Number of chats.
    """

    events: tuple[str, ...]
    people: tuple[str, ...]
    places: tuple[str, ...]
    times: tuple[str, ...]
    sentences: tuple[str, ...]
    count: int


def split_words(text: str) -> tuple[str, ...]:
    """Return the words between commas."""
    return tuple(text.split(","))


TRAINING = Words(
    events=split_words(
        "lunch,dinner,breakfast,coffee,haircut,dentist,football practice,piano lesson,"
        "job interview,movie night,yoga class,chess club,team meeting,book club,"
        "driving lesson,choir rehearsal,board games,swimming,budget review,parents' evening,"
        "eye test,birthday party"
    ),
    people=split_words(
        "Anna,Ben,Carla,David,Elif,Felix,Greta,Hassan,Ines,Jonas,Kira,Leo,Mia,Noah,Olga,"
        "Pavel,Rosa,Samir,Tina,Uwe,Vera,Wanda,Yusuf,Zoe,Dr. Keller,Mrs. Brown,Mr. Sato,"
        "Aunt Lucy"
    ),
    places=split_words(
        "Mario's,the library,Café Rosa,the town hall,room 12,Green Park,the office,"
        "the station,the sports hall,Main Street 5,the old mill,the museum,the harbour,"
        "Bella Napoli,the school,the clinic,Studio 4,the garden,the Blue Door,the market"
    ),
    times=split_words(
        "8 am,9:30 am,10 o'clock,11:15,noon,1 pm,2:30 pm,half past three,16:00,quarter past five,"
        "17:45,6 pm,seven in the evening,19:30,8:15 pm"
    ),
    sentences=(
        "{event} with {person} on {day} at {time}, {place}.",
        "Don't forget: {event} with {person} at {place}, {day} at {time}.",
        "Hi, this is {person}. Can we do {event} on {day} at {time}? We can meet at {place}.",
        "{day}, {time}: {event} with {person} at {place}.",
        "{person} wants to meet at {place} for {event}, {day} at {time}.",
        "See you at {place} for {event} on {day}, {time}. {person}",
        "On {day} I have {event} with {person}. It starts at {time} at {place}.",
        "We moved {event} with {person} to {day}, {time}. It is still at {place}.",
        "Reminder from {place}: your {event} with {person} is on {day} at {time}.",
        "Could you book {place} for {event} with {person} on {day} at {time}?",
    ),
    count=480,
)
HELD_OUT = Words(
    events=split_words(
        "brunch,guitar lesson,tennis,picnic,project review,band practice,vet visit,tax advice"
    ),
    people=split_words(
        "Amara,Bruno,Chloe,Dmitri,Esther,Farid,Helga,Ivan,Judith,Dr. Lopez,Mrs. Stone,Uncle Joe"
    ),
    places=split_words(
        "Luigi's,the theatre,Café Nord,room 31,River Park,the bakery,Hill Road 9,"
        "the lighthouse,the Red Lion,the pharmacy"
    ),
    times=split_words(
        "7:45 am,nine in the morning,10:30,quarter to twelve,12:15 pm,3 o'clock,half past four,"
        "5:15 pm,18:30,eight in the evening"
    ),
    sentences=(
        "Please put {event} with {person} in my calendar: {day}, {time}, at {place}.",
        "Are you free on {day} at {time}? {person} suggests {event} at {place}.",
        "Great news, {event} with {person} works! {day} at {time} at {place}.",
        "I'll wait at {place} on {day} at {time}. Looking forward to {event}, {person}.",
        "How about {event} with {person} at {place}? {day} at {time} suits me.",
    ),
    count=64,
)
FILES = {"appointments.jsonl": TRAINING, "appointments_heldout.jsonl": HELD_OUT}


def draw_chat(words: Words, generator: random.Random) -> dict[str, object]:
    """Return a chat: the instruction, a message, and the appointment in it."""
    values = {
        "event": generator.choice(words.events),
        "person": generator.choice(words.people),
        "day": generator.choice(DAYS),
        "time": generator.choice(words.times),
        "place": generator.choice(words.places),
    }
    message = generator.choice(words.sentences).format(**values)
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": message[0].upper() + message[1:]},
            {"role": "assistant", "content": json.dumps(values, ensure_ascii=False)},
        ]
    }


def build_files() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each file."""
    for seed, (name, words) in enumerate(FILES.items()):
        generator = random.Random(seed)
        chats = [draw_chat(words, generator) for _ in range(words.count)]
        yield FOLDER / name, "".join(json.dumps(c, ensure_ascii=False) + "\n" for c in chats)


def main() -> None:
    """Write the files, or compare them."""
    outdated = [
        path for path, text in build_files() if not path.is_file() or path.read_text() != text
    ]
    if sys.argv[1:] == ["--check"]:
        if outdated:
            sys.exit(f"outdated: {', '.join(path.name for path in outdated)}: run the script")
        return
    for path, text in build_files():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
