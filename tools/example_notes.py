"""Write the recordings of `examples/data/notes`: short melodies of five notes.

    uv run python -m tools.example_notes

The transcript of a recording is its notes, "C E G". Levels and pauses vary; the seed is fixed. A
wave of a note has a whole number of samples, so that a compressed recording has about 500 bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "examples" / "data" / "notes"
RATE = 2000
#: Note -> samples of a wave.
PERIODS = {"C": 8, "D": 7, "E": 6, "F": 5, "G": 4}
SIZES = {"train": 60, "eval": 10}
NOTES = 4


def melody(notes: str, rng: np.random.Generator) -> np.ndarray:
    """Return the samples of some notes, each followed by a pause."""
    parts = [np.zeros(int(rng.uniform(0.02, 0.06) * RATE))]
    for note in notes:
        wave = np.arange(int(0.1 * RATE)) / PERIODS[note]
        level = rng.uniform(0.3, 0.9)
        parts += [level * np.sin(2 * np.pi * wave), np.zeros(int(rng.uniform(0.05, 0.1) * RATE))]
    return np.concatenate(parts)


def main() -> None:
    """Write the recordings and the files that name them."""
    import soundfile

    rng, seen = np.random.default_rng(1), set[str]()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        rows = []
        while len(rows) < count:
            notes = "".join(rng.choice(list(PERIODS), NOTES))
            if notes in seen:
                continue
            seen.add(notes)
            soundfile.write(FOLDER / f"{notes}.flac", melody(notes, rng), RATE, subtype="PCM_S8")
            rows.append({"audio": f"{notes}.flac", "text": " ".join(notes)})
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (FOLDER / f"{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
