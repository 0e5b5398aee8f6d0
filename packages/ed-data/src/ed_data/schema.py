"""The schema of documents: token columns, the fields they are made from, and labels.

A source yields rows. A row becomes a document, an `Example`, whose fields are named as in the
schema. Each column of the schema becomes one sequence of tokens, and a group of arrays in a batch.
Other data needs only another `Schema`: the rest of the package accepts any schema.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ed_data.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from ed_data.media_access import RemoteFile

#: Fields by name, as stored in the source.
Row = dict[str, Any]
Message = dict[str, Any]
#: Optional fields of a row: arguments of the chat template, images and recordings of a chat.
TOOLS, KWARGS, IMAGES, IMAGE = "tools", "chat_template_kwargs", "images", "image"
AUDIOS, AUDIO = "audios", "audio"
OPTIONAL_FIELDS = (TOOLS, KWARGS, IMAGES, IMAGE, AUDIOS, AUDIO)


class Cell(str):
    """The text of a cell of a csv or tsv file, which has no types.

    Text fields read the text. Fields with numbers read a number, `true`, `false`, or nothing.
    """

    __slots__ = ()

    @property
    def value(self) -> float | bool | str | None:
        """The number or boolean of the cell; None for an empty cell; another text unchanged."""
        text = self.strip()
        if not text or text.lower() in ("null", "none", "na", "nan"):
            return None
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            return int(text)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            return str(self)


def read_cell(value: object) -> Any:
    """Return the value of a cell of a text file; other values are returned unchanged."""
    return value.value if isinstance(value, Cell) else value


#: A text, chat messages, token ids, the steps of an answer, or the words of a text.
Content = str | list[Message] | list[int] | list[str]
#: A path or address, encoded bytes, both as in `datasets`, or pixels [height, width(, channels)].
Image: TypeAlias = "str | bytes | dict[str, Any] | np.ndarray | RemoteFile"
#: A path or address, encoded bytes, `{path, bytes}`, or `{array, sampling_rate}`, as in `datasets`.
Audio: TypeAlias = "str | bytes | dict[str, Any] | RemoteFile"
#: The training target of a document: its tokens, a second sequence, a class, a score, a choice, or
#: the position of an answer.
Task = Literal[
    "causal_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "sequence_scoring",
    "sequence_ranking",
    "multiple_choice",
    "question_answering",
    "speech_seq2seq",
    "ctc",
    "image_classification",
    "image_text",
]
#: Tasks whose documents have the numbers of classes as their target.
CLASSIFYING = (
    "sequence_classification",
    "token_classification",
    "multiple_choice",
    "image_classification",
)
#: Tasks with one target for each row, which therefore contains one document.
ONE_PER_ROW = (
    "sequence_classification",
    "sequence_scoring",
    "sequence_ranking",
    "multiple_choice",
    "question_answering",
    "image_classification",
    "image_text",
)
#: Tasks whose documents are an image without a placeholder in the tokens.
SEEING = ("image_classification", "image_text")
#: Tasks with one column.
_ONE_COLUMN = (
    "sequence_classification",
    "token_classification",
    "sequence_scoring",
    "question_answering",
    "image_classification",
)
#: Tasks whose documents are recordings with their transcripts, and the column of the transcript.
HEARING = {"speech_seq2seq": "decoder", "ctc": ""}


@dataclass(frozen=True)
class Column:
    """One sequence of tokens of each document.

    Attributes:
        name: prefix of the arrays in a batch: `<name>_input_ids`, `<name>_labels`, …; `""` means
            `input_ids`, `labels`, ….
        field: field whose tokens have loss.
        context: field whose tokens come first, without loss; None if there is no such field.
        steps: whether the field is a list of texts, the steps of an answer, each followed by a line
            end.
        words: whether the field is a list of words, of which the text consists.
        second: field with the second text of a pair; the tokenizer joins both texts.
        item: number of the text that the column reads, from 0, if its last field (`second`, or
            `field`) is a list of texts.
        stride: number of tokens that consecutive windows share. A pair that is longer than a row
            becomes several documents, which differ in the window of the second text. None: one
            document, which is truncated.
    """

    name: str
    field: str
    context: str | None = None
    steps: bool = False
    words: bool = False
    second: str | None = None
    item: int | None = None
    stride: int | None = None

    @property
    def listed(self) -> str | None:
        """The field with a list of texts, of which the column reads one."""
        return None if self.item is None else self.second or self.field

    @property
    def in_parts(self) -> bool:
        """Whether the field is a list of texts, which may have one value each."""
        return self.steps or self.words


#: Value of tokens without a value, as in labels.
NO_VALUE = -100.0


@dataclass(frozen=True)
class Value:
    """A number of each document, of each step of an answer, or of each word.

    In a batch it is a float32 array [b, s] with the number at each token of one column, at the
    last token of each step, or at the first token of each word, and -100 elsewhere. It is therefore
    packed like the tokens.

    Attributes:
        name: name of the array.
        field: field with a number, true or false; for steps and words a list of them.
        column: name of the column whose tokens have the value.
        default: value of rows without the field; None raises an error for such rows.
        other_field: field that is read if a row has no `field`.
        classes: names of classes, which the field may contain instead of their numbers.
        token_types: whether the numbers are the token types of a pair of texts (0 and 1), which the
            tokenizer returns; then the field is not read.
        margin: number of the negative text, from 0, whose margin the value is; see
            `ed_data.rows.contents.margins`. None: the value is no margin.
    """

    name: str
    field: str
    column: str = ""
    default: float | None = None
    other_field: str | None = None
    classes: tuple[str, ...] = ()
    token_types: bool = False
    margin: int | None = None


@dataclass(frozen=True)
class Schema:
    """The columns of a document, made from the fields of a row.

    A document with several columns is truncated at the length of a row and never split over two
    rows. Its columns have the same number in every `<name>_segment_ids`.

    Attributes:
        columns: at least one.
        content: the field that `Inform.content_field` renames. Documents with equal content are
            held out together.
        values: numbers of the documents.
        task: `seq2seq_lm` has the columns `""` (encoder) and `decoder`, and the batch gets
            `decoder_input_ids` and `labels` of the decoder. `sequence_classification` and
            `token_classification` have the column `""` and the value `label`, which becomes
            `labels` [b] or [b, s] instead of token labels. `sequence_scoring` has a float32 value
            `label`, and `multiple_choice` one column for each choice; both get `labels` [b].
            `sequence_ranking` has one column for each document, and no labels.
            `question_answering` has the values `start_positions` and `end_positions`, int32 [b].
            `speech_seq2seq` has the column `decoder`, and `ctc` the column `""`: the tokens of
            a transcript, which become `labels`. `image_classification` has the column `""`, whose
            content is the image, and the value `label`; the batch has `pixel_values` and `labels`
            [b]. `image_text` has a text in addition to an image.
        other_content: fields that contain the content of a row without the field `content`, unless
            the inform names a field.

    Raises:
        DataError: columns or values share a name, a value names an unknown column, no column reads
            the content, or the task needs other columns.
    """

    columns: tuple[Column, ...]
    content: str = "content"
    values: tuple[Value, ...] = ()
    task: Task = "causal_lm"
    other_content: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len({*names}) < len(names):
            raise DataError(f"the columns of a schema need different names, got {names}")
        if all(self.content not in (c.field, c.context, c.second) for c in self.columns):
            raise DataError(f"no column of the schema reads the content field {self.content!r}")

        value_names = [value.name for value in self.values]
        if len({*value_names}) < len(value_names):
            raise DataError(f"the values of a schema need different names, got {value_names}")
        for value in self.values:
            if value.column not in names:
                raise DataError(
                    f"the value {value.name!r} names the column {value.column!r}, but the columns "
                    f"are {names}"
                )
        if self.task == "seq2seq_lm" and (names != ["", "decoder"] or self.values):
            raise DataError(
                f"a schema of task seq2seq_lm has the columns ['', 'decoder'] and no values, got "
                f"the columns {names} and the values {value_names}"
            )
        labels = [value.name for value in self.values if not value.token_types]
        expected_labels = ["start_positions", "end_positions"] if self.has_spans else ["label"]
        columns = [""] if self.task in _ONE_COLUMN else names
        if self.task in {*_ONE_COLUMN, *CLASSIFYING} and (
            names != columns or labels != expected_labels
        ):
            raise DataError(
                f"a schema of task {self.task} has the columns {columns} and the values "
                f"{expected_labels}, "
                f"got the columns {names} and the values {labels}"
            )

        if self.has_audio and (names != [HEARING[self.task]] or self.values):
            raise DataError(
                f"a schema of task {self.task} has the columns {[HEARING[self.task]]} and no "
                f"values, got the columns {names} and the values {value_names}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; unused attributes are omitted, so older caches stay valid."""
        column_options = ("steps", "words", "second", "item", "stride")
        columns = [_drop_unused(asdict(c), column_options) for c in self.columns]
        later = ("other_field", "classes", "token_types", "margin")
        values = (
            {"values": [_drop_unused(asdict(v), later) for v in self.values]} if self.values else {}
        )
        task = {} if self.task == "causal_lm" else {"task": self.task}
        return {"columns": columns, "content": self.content, **values, **task}

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that the columns read, the content first."""
        every = [name for c in self.columns for name in (c.context, c.field, c.second)]
        read = [name for name in every if name is not None]
        return tuple(dict.fromkeys([self.content, *read]))

    @property
    def has_audio(self) -> bool:
        """Whether each row has a recording."""
        return self.task in HEARING

    @property
    def has_image(self) -> bool:
        """Whether each row has one image, which its tokens do not mention."""
        return self.task in SEEING

    @property
    def has_text(self) -> bool:
        """Whether documents have tokens."""
        return self.task != "image_classification"

    @property
    def learned(self) -> frozenset[str]:
        """The fields with loss. A row in which one of them is empty is dropped."""
        return frozenset(column.field for column in self.columns)

    @property
    def has_spans(self) -> bool:
        """Whether the target is the span of an answer."""
        return self.task == "question_answering"

    @property
    def lists(self) -> dict[str, int]:
        """Fields with lists of texts, and the number of texts that the columns read."""
        counts: dict[str, int] = {}
        for column in self.columns:
            if column.listed is not None and column.item is not None:
                counts[column.listed] = max(counts.get(column.listed, 0), column.item + 1)
        return counts

    def with_classes(self, names: tuple[str, ...]) -> Schema:
        """Return the schema whose labels may be names of classes."""
        values = tuple(replace(v, classes=names) if v.name == "label" else v for v in self.values)
        return replace(self, values=values)


def _drop_unused(attributes: dict[str, Any], optional: tuple[str, ...]) -> dict[str, Any]:
    """Return the attributes without unused optional ones."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in optional or not (value is None or value is False or value == ())
    }


_ANSWER = Column("", "completion", "prompt")
#: A text, a chat, or token ids in one field.
TEXT = Schema((Column("", "content"),), other_content=("messages",))
#: A prompt for rollouts; see `ed_data.batches.prompts`.
PROMPT = Schema((Column("", "prompt"),), "prompt")
#: A prompt and its answer; only the answer has loss.
COMPLETION = Schema((_ANSWER,), "prompt")
#: A prompt with a better and a worse answer: `chosen_input_ids`, …, `rejected_input_ids`, ….
PREFERENCE = Schema(
    (Column("chosen", "chosen", "prompt"), Column("rejected", "rejected", "prompt")), "prompt"
)
#: A preference pair with the `margin` between its answers; 0 in rows without the field.
REWARD = Schema(PREFERENCE.columns, "prompt", (Value("margin", "margin", "chosen", 0.0),))
#: An answer with a `label`: 1 if it is good, else 0 (KTO).
LABELLED = Schema((_ANSWER,), "prompt", (Value("label", "label"),))
#: An answer with a `reward`.
REWARDED = Schema((_ANSWER,), "prompt", (Value("reward", "reward"),))
#: An answer in steps, each correct or not: `step_labels` at the last token of each step.
STEPS = Schema(
    (Column("", "completions", "prompt", steps=True),), "prompt", (Value("step_labels", "labels"),)
)
#: Two texts with the same meaning, for embeddings: `anchor_input_ids`, …, `positive_input_ids`, ….
EMBEDDING = Schema((Column("anchor", "anchor"), Column("positive", "positive")), "anchor")
#: Two texts and the `score` of their similarity: `sentence1_input_ids`, ….
SCORED_PAIR = Schema(
    (Column("sentence1", "sentence1"), Column("sentence2", "sentence2")),
    "sentence1",
    (Value("score", "score", "sentence1", other_field="label"),),
)
#: A source text and a target text for encoder-decoder models.
SEQ2SEQ = Schema(
    (Column("", "prompt"), Column("decoder", "completion")), "prompt", (), "seq2seq_lm"
)
#: A text and the number of its class: `labels` [b].
CLASSIFICATION = Schema(
    (Column("", "text"),), "text", (Value("label", "label"),), "sequence_classification"
)
#: An image and the number of its class: `pixel_values` [b, 1, c, h, w], `labels` [b].
IMAGE_CLASSIFICATION = Schema(
    (Column("", IMAGE),), IMAGE, (Value("label", "label"),), "image_classification"
)
#: An image and its caption: `pixel_values` [b, 1, c, h, w], `input_ids`, `segment_ids`.
IMAGE_TEXT = Schema((Column("", "text"),), "text", (), "image_text", ("caption",))
#: Two texts and the number of their class: `labels` [b], `token_type_ids` [b, s].
PAIR_CLASSIFICATION = Schema(
    (Column("", "text", second="text_pair"),),
    "text",
    (Value("label", "label"), Value("token_type_ids", "text_pair", token_types=True)),
    "sequence_classification",
)
#: Words and the numbers of their classes: `labels` [b, s] at the first token of each word.
TOKEN_CLASSIFICATION = Schema(
    (Column("", "tokens", words=True),),
    "tokens",
    (Value("label", "labels", other_field="ner_tags"),),
    "token_classification",
)
#: A query, a document and the `label` of the pair, a number: `labels` float32 [b].
RELEVANCE = Schema(
    (Column("", "query", second="document"),),
    "query",
    (
        Value("label", "label", other_field="score"),
        Value("token_type_ids", "document", token_types=True),
    ),
    "sequence_scoring",
)
#: A prompt with a better and a worse answer for encoder-decoders: the encoder reads the prompt.
SEQ2SEQ_PREFERENCE = Schema(
    (Column("", "prompt"), Column("chosen", "chosen"), Column("rejected", "rejected")), "prompt"
)
#: Default number of tokens that consecutive windows of a context share.
STRIDE = 128


def embedding_schema(negatives: int = 0, *, margins: bool = False) -> Schema:
    """Return the schema of pairs of texts with negative texts.

    Args:
        negatives: number of negative texts of a row: `negative`, a text or a list of texts, or
            `negative_1`, `negative_2`, ….
        margins: whether rows have `score`: the margin by which a teacher prefers the positive text
            to each negative text, or the scores of the positive and of all negative texts.
    """
    columns = [
        Column(f"negative_{number + 1}", "negative", item=number) for number in range(negatives)
    ]
    values = [
        Value(f"margin_{number + 1}", "score", "anchor", other_field="label", margin=number)
        for number in range(negatives if margins else 0)
    ]
    return Schema((*EMBEDDING.columns, *columns), "anchor", tuple(values))


def choice_schema(choices: int) -> Schema:
    """Return the schema of a question with a number of choices, and the number of the right choice.

    Rows have `question`, `choices` (a list of texts, or `choice_1`, `choice_2`, …), and `label` or
    `answer`. Batches have `choice_<n>_input_ids`, …, from 1, and `labels` [b].
    """
    names = [f"choice_{number + 1}" for number in range(choices)]
    columns = [
        Column(name, "question", second="choices", item=number) for number, name in enumerate(names)
    ]
    types = [Value(f"{name}_token_type_ids", "", name, token_types=True) for name in names]
    label = Value("label", "label", names[0], other_field="answer")
    return Schema(tuple(columns), "question", (label, *types), "multiple_choice")


def candidate_schema(negatives: int) -> Schema:
    """Return the schema of a query with a positive document and negative documents.

    Rows have `query`, `positive`, and `negative`, a text or a list of texts, or `negative_1`,
    `negative_2`, …. Batches have `positive_input_ids`, … and `negative_<n>_input_ids`, … of the
    pairs with the query.
    """
    columns = [Column("positive", "query", second="positive")]
    columns += [
        Column(f"negative_{number + 1}", "query", second="negative", item=number)
        for number in range(negatives)
    ]
    types = [Value(f"{c.name}_token_type_ids", "", c.name, token_types=True) for c in columns]
    return Schema(tuple(columns), "query", tuple(types), "sequence_ranking")


def answer_schema(stride: int = STRIDE) -> Schema:
    """Return the schema of questions about a context, as in SQuAD.

    Rows have `question`, `context` and `answers`: `{"text": [...], "answer_start": [...]}`, empty
    lists if there is no answer. A long context becomes several documents. All questions about a
    context are held out together.

    Args:
        stride: number of tokens of the context that consecutive windows share.
    """
    values = (
        Value("start_positions", "answers"),
        Value("end_positions", "answers"),
        Value("token_type_ids", "context", token_types=True),
    )
    column = Column("", "question", second="context", stride=stride)
    return Schema((column,), "context", values, "question_answering")


#: A question with four choices: `choice_1_input_ids`, …, and `labels` [b].
CHOICE = choice_schema(4)
#: A question, its context and its answers: `start_positions` and `end_positions` [b].
QUESTION_ANSWERING = answer_schema()
_TRANSCRIPTS = ("sentence", "transcription")
#: A recording and its transcript, for encoder-decoders such as Whisper.
SPEECH_SEQ2SEQ = Schema(
    (Column("decoder", "text"),), "text", (), "speech_seq2seq", other_content=_TRANSCRIPTS
)
#: A recording and its transcript, for models that score the labels of each time step.
CTC = Schema((Column("", "text"),), "text", (), "ctc", other_content=_TRANSCRIPTS)
