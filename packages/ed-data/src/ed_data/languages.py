"""The languages of Whisper's tokenizer: codes and English names.

The tables equal those of `transformers`, whose import needs seconds.
"""

from __future__ import annotations

from ed_data.errors import did_you_mean

_CODES = """
en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese
pt:portuguese tr:turkish pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian
id:indonesian hi:hindi fi:finnish vi:vietnamese he:hebrew uk:ukrainian el:greek ms:malay
cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian th:thai ur:urdu hr:croatian
bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh sk:slovak te:telugu
fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian kn:kannada et:estonian
mk:macedonian br:breton eu:basque is:icelandic hy:armenian ne:nepali mn:mongolian bs:bosnian
kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi pa:punjabi si:sinhala km:khmer sn:shona
yo:yoruba so:somali af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik sd:sindhi
gu:gujarati am:amharic yi:yiddish lo:lao uz:uzbek fo:faroese ht:haitian_creole ps:pashto
tk:turkmen nn:nynorsk mt:maltese sa:sanskrit lb:luxembourgish my:myanmar bo:tibetan tl:tagalog
mg:malagasy as:assamese tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir jw:javanese
su:sundanese yue:cantonese
"""
_OTHER_NAMES = """
my:burmese ca:valencian nl:flemish ht:haitian lb:letzeburgesch ps:pushto pa:panjabi ro:moldavian
ro:moldovan si:sinhalese es:castilian zh:mandarin
"""


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = (pair.split(":") for pair in text.split())
    return [(code, name.replace("_", " ")) for code, name in pairs]


#: Code -> English name.
LANGUAGES: dict[str, str] = dict(_pairs(_CODES))
#: English name in lower case -> code; some languages have several names.
CODES: dict[str, str] = {
    name: code for text in (_CODES, _OTHER_NAMES) for code, name in _pairs(text)
}


def language_code(language: str) -> str:
    """Return the code of a language, which is given by its code or its English name.

    Raises:
        ValueError: Whisper has no such language.
    """
    lower = language.lower()
    code = CODES.get(lower, lower)
    if code not in LANGUAGES:
        raise ValueError(
            f"language={language!r} is not a language of Whisper"
            f"{did_you_mean(lower, [*LANGUAGES, *CODES])}: use a code such as 'en', or an English "
            "name"
        )
    return code
