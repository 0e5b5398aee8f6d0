"""Speech to text: transcripts of audio of any length."""

from ed_models.speech.transcriber import Segment as Segment
from ed_models.speech.transcriber import Transcriber as Transcriber
from ed_models.speech.transcriber import Transcript as Transcript
from ed_models.speech.transcriber import load_transcriber as load_transcriber
from ed_models.speech.transcript import SpokenWord as SpokenWord
