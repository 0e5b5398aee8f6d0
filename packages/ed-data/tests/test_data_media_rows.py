"""Rows are data of strangers: which files and addresses an image or a recording may name."""

from __future__ import annotations

import base64
import http.server
import io
import json
import os
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
from ed_data import DataError, Inform, Media, Mixture, build_prompts, documents
from ed_data import media_access as access
from ed_data.media_access import RemoteFile, open_local, read_media
from ed_data.public_addresses import is_public
from ed_data.rows.recordings import header
from ed_data.schema import CTC, IMAGE_CLASSIFICATION
from ed_data.sources import open_source
from ed_data.tokens.images import get_size
from pydantic import ValidationError

Image = pytest.importorskip("PIL.Image")
soundfile = pytest.importorskip("soundfile")


def png() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (3, 4)).save(stream, "PNG")
    return stream.getvalue()


def wav() -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, [0.1] * 800, 8000, format="WAV")
    return stream.getvalue()


class Site(NamedTuple):
    """A web server of this machine, and the paths that were requested."""

    url: str
    requests: list[str]


@pytest.fixture
def site() -> Iterator[Site]:
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            requests.append(self.path)
            body = wav() if "wav" in self.path else png()
            if self.path.startswith("/moved"):
                self.send_response(302)
                self.send_header("Location", "/x.png")
                body = b""
            elif self.path.startswith("/large"):
                self.send_response(200)
                body = bytes(5000)
            else:
                self.send_response(200)
            if self.path.startswith("/slow"):
                self.end_headers()
                for _ in range(100):
                    time.sleep(0.05)
                    try:
                        self.wfile.write(b"x")
                    except OSError:
                        return
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield Site(f"http://127.0.0.1:{server.server_port}", requests)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a data set; beside it are files that its rows may not read."""
    inside = tmp_path / "rows"
    (inside / "media").mkdir(parents=True)
    for name, content in (("x.png", png()), ("x.wav", wav())):
        (inside / "media" / name).write_bytes(content)
        (tmp_path / f"secret-{name}").write_bytes(content)
        (inside / f"link-{name}").symlink_to(tmp_path / f"secret-{name}")
        (inside / f"good-{name}").symlink_to(Path("media", name))
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr(name, content)
    (inside / "up").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    monkeypatch.chdir(tmp_path)
    return inside


def read(folder: Path, value: object, media: Media | None = None, name: str = "image") -> None:
    """Read the medium of a data set with one row."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({name: value, "label": 0, "text": "a"}))
    read_rows_of(Inform(data_files=str(rows)), media, name)


def read_rows_of(inform: Inform, media: Media | None = None, name: str = "image") -> None:
    schema = IMAGE_CLASSIFICATION if name == "image" else CTC
    for example in documents(inform, schema=schema, media=media):
        if name == "image":
            assert get_size(example.images[0]) == (4, 3)
        else:
            assert header(example.recordings[0]).frames == 800


#: Paths and addresses outside of the data set, for the folder above it, a web server and a file.
OUTSIDE: dict[str, Callable[[str, str, str], object]] = {
    "absolute path": lambda above, url, file: f"{above}/secret-{file}",
    "parent": lambda above, url, file: f"../secret-{file}",
    "parent of a folder": lambda above, url, file: f"media/../../secret-{file}",
    "file address": lambda above, url, file: f"file://{above}/secret-{file}",
    "file address of this host": lambda above, url, file: f"FILE://localhost{above}/secret-{file}",
    "local address": lambda above, url, file: f"local://{above}/secret-{file}",
    "link": lambda above, url, file: f"link-{file}",
    "folder link": lambda above, url, file: f"up/secret-{file}",
    "working folder": lambda above, url, file: f"secret-{file}",
    "home": lambda above, url, file: f"~/secret-{file}",
    "mapping": lambda above, url, file: {"bytes": None, "path": f"{above}/secret-{file}"},
    "web address": lambda above, url, file: f"{url}/{file}",
    "web address in capitals": lambda above, url, file: f"HTTP{url[4:]}/{file}",
    "space before": lambda above, url, file: f" {url}/{file}",
    "reference": lambda above, url, file: f"reference::{url}/{file}",
    "reference of a file": lambda above, url, file: f"reference://x::{url}/{file}",
    "simplecache": lambda above, url, file: f"simplecache::{url}/{file}",
    "filecache": lambda above, url, file: f"filecache::file://{above}/secret-{file}",
    "blockcache": lambda above, url, file: f"blockcache::{url}/{file}",
    "directory": lambda above, url, file: f"dir://secret-{file}::file://{above}",
    "zip": lambda above, url, file: f"zip://{file}::{above}/{file}.zip",
    "zip of a web address": lambda above, url, file: f"zip://{file}::{url}/{file}.zip",
    "libarchive": lambda above, url, file: f"libarchive://{file}::{above}/{file}.zip",
    "tar": lambda above, url, file: f"tar://{file}::{above}/{file}.tar",
    "git": lambda above, url, file: f"git://{above}:{file}",
    "github": lambda above, url, file: f"github://a:b@main/{file}",
    "memory": lambda above, url, file: f"memory://{file}",
    "ssh": lambda above, url, file: f"sftp://127.0.0.1/{file}",
    "ftp": lambda above, url, file: f"ftp://127.0.0.1/{file}",
    "smb": lambda above, url, file: f"smb://127.0.0.1/share/{file}",
    "store": lambda above, url, file: f"s3://bucket/{file}",
    "hub": lambda above, url, file: f"hf://datasets/a/b/{file}",
    "percent": lambda above, url, file: f"%2e%2e/secret-{file}",
    "Windows path": lambda above, url, file: f"C:\\Users\\secret-{file}",
    "Windows parent": lambda above, url, file: f"..\\secret-{file}",
    "share": lambda above, url, file: f"\\\\host\\share\\{file}",
    "share with slashes": lambda above, url, file: f"//host/share/{file}",
    "NUL": lambda above, url, file: f"media/{file}\0.png",
    "long name": lambda above, url, file: "a" * 300 + file,
    "long path": lambda above, url, file: "a/" * 5000 + file,
    "folder": lambda above, url, file: "media",
    "empty": lambda above, url, file: "",
    "device": lambda above, url, file: "/dev/zero",
    "process": lambda above, url, file: "/proc/self/environ",
    "pipe": lambda above, url, file: "pipe",
}


@pytest.mark.parametrize("name", ["image", "audio"])
@pytest.mark.parametrize("attack", OUTSIDE)
def test_rows_read_nothing_outside_of_their_data_set(
    folder: Path, site: Site, attack: str, name: str
) -> None:
    file = "x.png" if name == "image" else "x.wav"
    fsspec.filesystem("memory").pipe(f"/{file}", png() if name == "image" else wav())
    with pytest.raises(DataError, match="inform 'rows'"):
        read(folder, OUTSIDE[attack](str(folder.parent), site.url, file), name=name)
    assert not site.requests


@pytest.mark.parametrize("name", ["image", "audio"])
def test_parts_of_messages_obey_the_same_rules(folder: Path, site: Site, name: str) -> None:
    file = "x.png" if name == "image" else "x.wav"
    for attack, address in OUTSIDE.items():
        value = address(str(folder.parent), site.url, file)
        forms = [{"path": value}, {"url": value}, {f"{name}_url": {"url": value}}, {name: value}]
        for form in forms:
            part = {"type": name, **form}
            row = {"messages": [{"role": "user", "content": [part]}]}
            (folder / "rows.jsonl").write_text(json.dumps(row))
            inform = Inform(data_files=str(folder / "rows.jsonl"), content_field="messages")
            with pytest.raises(DataError, match="inform 'rows'"):
                pytest.fail(f"{attack}: {next(documents(inform)).media}")
    assert not site.requests


@pytest.mark.parametrize("name", ["image", "audio"])
def test_rows_read_the_files_of_their_data_set(folder: Path, name: str) -> None:
    file, content = ("x.png", png()) if name == "image" else ("x.wav", wav())
    text = base64.b64encode(content).decode()
    inside = [
        f"media/{file}",
        f"./media/../media/{file}",
        f"{folder}/media/{file}",
        f"file://{folder}/media/{file}",
        f"good-{file}",
        f"rows/media/{file}",
        f"data:application/octet-stream;base64,{text}",
        f"DATA:;base64,{text}",
        {"path": f"media/{file}"},
    ]
    for value in inside:
        read(folder, value, name=name)


def test_rows_of_a_named_folder_read_all_its_files(folder: Path) -> None:
    (folder / "train").mkdir()
    (folder / "train/a.jsonl").write_text('{"image": "../media/x.png", "label": 0}')
    read_rows_of(Inform(type="json", data_files=str(folder)))
    with pytest.raises(DataError, match="may not name"):
        read_rows_of(Inform(data_files=str(folder / "train/a.jsonl")))


def test_listed_places_are_read(folder: Path, site: Site) -> None:
    above = str(folder.parent)
    port = site.url.rpartition(":")[2]
    for allowed in (above, "./", "."):  # the working folder is the folder above
        media = Media(allowed=[allowed])
        read(folder, f"{above}/secret-x.png", media)
        read(folder, "secret-x.png", media)
    for entry in ("127.0.0.1", "http://127.0.0.1", f"127.0.0.1:{port}", site.url):
        read(folder, f"{site.url}/x.png", Media(allowed=[entry]))
        read(folder, f"{site.url}/x.wav", Media(allowed=[entry]), "audio")
    fsspec.filesystem("memory").pipe("/set/media/x.png", png())
    rows = json.dumps({"image": "media/x.png", "label": 0}).encode()
    fsspec.filesystem("memory").pipe("/set/rows.jsonl", rows)
    read_rows_of(Inform(data_files="memory://set/rows.jsonl"))


def test_other_hosts_ports_and_schemes_are_not_requested(folder: Path, site: Site) -> None:
    port = site.url.rpartition(":")[2]
    refused = {
        f"http://localhost:{port}/x.png": ["127.0.0.1"],
        f"http://127.1:{port}/x.png": ["127.0.0.1"],
        f"http://2130706433:{port}/x.png": ["127.0.0.1"],
        f"http://127.0.0.1@localhost:{port}/x.png": ["127.0.0.1"],
        f"http://127.0.0.1.:{port}/x.png": ["127.0.0.1"],
        f"http://127.0.0.1:{port}@evil.example/x.png": ["127.0.0.1"],
        f"{site.url}/x.png": ["https://127.0.0.1", "127.0.0.1:1", "0.0.1", "s3://127.0.0.1"],
        "http:///x.png": ["127.0.0.1"],
        "http://[::1/x.png": ["::1"],
    }
    for address, allowed in refused.items():
        with pytest.raises(DataError, match="inform 'rows'"):
            read(folder, address, Media(allowed=allowed))
    assert not site.requests


def test_listed_names_with_private_addresses_are_not_requested(folder: Path, site: Site) -> None:
    address = f"http://localhost:{site.url.rpartition(':')[2]}/x.png"
    with pytest.raises(DataError, match="which is not public"):
        read(folder, address, Media(allowed=["localhost"]))
    assert not site.requests
    read(folder, address, Media(allowed=["localhost", "127.0.0.1", "::1"]))


def test_redirects_large_and_slow_answers_are_errors(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Media(allowed=["127.0.0.1"]).hosts
    with pytest.raises(OSError, match="status 302"):
        read_media(RemoteFile(f"{site.url}/moved", hosts), 1000)
    with pytest.raises(OSError, match="1000"):
        read_media(RemoteFile(f"{site.url}/large", hosts), 1000)
    monkeypatch.setattr(access, "DOWNLOAD_SECONDS", 0.3)
    with pytest.raises(OSError, match=r"more than 0\.3 s"):
        read_media(RemoteFile(f"{site.url}/slow", hosts), 1000)
    assert site.requests == ["/moved", "/large", "/slow"]


def test_stores_are_read_only_below_a_named_folder(folder: Path) -> None:
    media = Media(allowed=["s3://bucket/images", "hf://datasets/a/b"])
    inside = [
        "s3://bucket/images/x.png",
        "s3a://bucket/images/a/x.png",
        "hf://datasets/a/b@1/x.png",
    ]
    outside = [
        "s3://bucket/x.png",
        "s3://bucket/images2/x.png",
        "s3://other/images/x.png",
        "s3://bucket/images/../x.png",
        "s3://bucket/images/%2e%2e/x.png",
        "s3://bucket/images/%252e%252e/x.png",
        "s3://bucket/images/..%2fx.png",
        "s3://bucket/images/..\\x.png",
        "s3://bucket/images//x.png",
        "s3://bucket/images/a.zip::file:///etc/passwd",
        "gs://bucket/images/x.png",
        "hf://datasets/a/c/x.png",
        "hf://a/b/x.png",
        "simplecache::s3://bucket/images/x.png",
    ]
    rows = folder / "rows.jsonl"
    for address in [*inside, *outside]:
        rows.write_text(json.dumps({"image": address, "label": 0}))
        found = documents(Inform(data_files=str(rows)), schema=IMAGE_CLASSIFICATION, media=media)
        if address in inside:
            assert next(found).images[0].source == RemoteFile(address)
        else:
            with pytest.raises(DataError, match="may not name"):
                next(found)
    with pytest.raises(OSError, match="chain"):
        read_media(RemoteFile("s3://bucket/images/a.zip::file:///etc/passwd"), 1000)


@pytest.mark.parametrize(
    "entry", ["", "//host/x", "https://a.example/images", "ftp://a", "s3://", "s3://b/../c", "a b"]
)
def test_invalid_entries_of_the_list_are_errors(entry: str) -> None:
    with pytest.raises(ValidationError, match=r"allowed\.0"):
        Media(allowed=[entry])


def test_a_file_that_became_a_link_a_pipe_or_large_is_not_read(folder: Path) -> None:
    with pytest.raises(OSError, match="symbolic link"):
        open_local(str(folder / "link-x.png"), 1000)
    with pytest.raises(OSError, match="not a regular file"):
        open_local(str(folder / "pipe"), 1000)
    with pytest.raises(OSError, match="not a regular file"):
        open_local("/dev/zero", 1000)
    with pytest.raises(OSError, match="the limit is 10"):
        open_local(str(folder / "media/x.png"), 10)
    sparse = folder / "sparse.png"
    with sparse.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="the file has more than"):
        read(folder, "sparse.png")


def test_parquet_rows_obey_the_same_rules(folder: Path, site: Site) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for attack in ("absolute path", "web address", "link", "reference", "zip"):
        value = OUTSIDE[attack](str(folder.parent), site.url, "x.png")
        table = pa.table({"image": [{"bytes": None, "path": value}], "label": [0]})
        pq.write_table(table, folder / "a.parquet")
        with pytest.raises(DataError, match="may not name"):
            read_rows_of(Inform(data_files=str(folder / "a.parquet")))
    assert not site.requests


def test_features_of_datasets_are_not_decoded(folder: Path, site: Site) -> None:
    """`datasets` reads any path and address of a feature that it decodes."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.Value("int64"),
        many=datasets.List(datasets.Image()),
        inner={"image": datasets.Image()},
    )
    for address in (f"{folder.parent}/secret-x.png", f"{site.url}/x.png"):
        value = {"bytes": None, "path": address}
        row = {"image": value, "label": 0, "many": [value], "inner": {"image": value}}
        table = pa.Table.from_pylist([row], features.arrow_schema)
        saved = folder.parent / "set" / str(address.startswith("http"))
        saved.mkdir(parents=True)
        pq.write_table(table, saved / "train.parquet")
        inform = Inform(type="huggingface", data_files=str(saved))
        ((_, stored),) = open_source(inform).rows()
        assert stored == row
        with pytest.raises(DataError, match="may not name"):
            read_rows_of(inform)
    assert not site.requests


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_cards_of_datasets_name_only_their_own_files(
    folder: Path, site: Site, monkeypatch: pytest.MonkeyPatch, name: str, streaming: bool
) -> None:
    from ed_data.sources.files import FileCache

    (folder.parent / "secret.jsonl").write_text('{"content": "secret"}')
    (folder / "mine.jsonl").write_text('{"content": "mine"}')
    (folder / "link.jsonl").symlink_to(folder.parent / "secret.jsonl")
    card = folder / name
    inform = Inform(type="huggingface", data_files=str(folder))
    cache = FileCache(None, streaming=streaming)
    paths = [
        "../secret.jsonl",
        f"{folder.parent}/secret.jsonl",
        "link.jsonl",
        f"{site.url}/a.jsonl",
    ]
    paths += [f"file://{folder.parent}/secret.jsonl", f"reference::{site.url}/a.json", "../*.jsonl"]
    for path in paths:
        options = {"configs": [{"config_name": "default", "data_files": path}]}
        text = json.dumps(options)
        card.write_text(f"---\n{text}\n---\n" if name == "README.md" else text)
        with pytest.raises(DataError, match="not in the dataset"):
            next(iter(open_source(inform, cache).rows()))
    options["configs"][0]["data_files"] = "mine.jsonl"
    text = json.dumps(options)
    card.write_text(f"---\n{text}\n---\n" if name == "README.md" else text)
    assert next(iter(open_source(inform, cache).rows()))[1] == {"content": "mine"}
    assert not site.requests


@pytest.mark.proves("mixture.media", "mixture.media.allowed")
def test_a_mixture_applies_its_list_to_every_reader(folder: Path, tokenizer) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"image": "../secret-x.png", "text": "a"}))
    inform = Inform(type="visual", data_files=str(rows), image_field="image", text_field="text")
    mixture = Mixture(informs=[inform], cache_dir=str(folder / "cache"))
    with pytest.raises(DataError, match="may not name"):
        build_prompts(mixture, tokenizer, batch_size=1)
    allowed = mixture.replace(media={"allowed": [folder.parent]})
    batch = build_prompts(allowed, tokenizer, batch_size=1).batch_at(0)
    assert batch.fields["image"] == [str(folder.parent / "secret-x.png")]


#: One address of each kind of IANA's registries of special addresses, and public ones.
PRIVATE = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.9.9.9", "169.254.169.254",
    "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1",
    "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "::127.0.0.1", "::10.0.0.1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1",
    "64:ff9b:1::10.0.0.1", "100::1", "2001::1", "2001:0:7f00:1::1", "2001:2::1", "2001:10::1",
    "2001:20::1", "2001:db8::1", "2002:7f00:1::1", "2002:a00:1::1", "3fff::1", "5f00::1",
    "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "4000::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "100.63.0.1", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450::1"]


@pytest.mark.parametrize("number", PRIVATE)
def test_special_addresses_are_not_public(number: str) -> None:
    assert not is_public(number)


@pytest.mark.parametrize("number", PUBLIC)
def test_addresses_of_the_internet_are_public(number: str) -> None:
    assert is_public(number)


def _add_tar_member(archive: tarfile.TarFile, name: str, content: bytes = b"", **more: Any) -> None:
    member = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(member, key, value)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_archives_of_a_dataset_read_and_write_nothing_outside(tmp_path: Path, kind: str) -> None:
    secret, row = tmp_path / "secret.jsonl", b'{"content": "mine"}\n'
    secret.write_text('{"content": "secret"}\n')
    folder = tmp_path / "set"
    folder.mkdir()
    outside = ["../evil.jsonl", f"{tmp_path}/evil.jsonl", "a/../../../evil.jsonl"]
    if kind == "zip":
        with zipfile.ZipFile(folder / "train.zip", "w") as archive:
            archive.writestr("train.jsonl", row)
            for name in outside:
                archive.writestr(name, row)
            link = zipfile.ZipInfo("link.jsonl")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, str(secret))
    else:
        with tarfile.open(folder / f"train.{kind}", "w:gz" if kind == "tar.gz" else "w") as archive:
            _add_tar_member(archive, "train.jsonl", row)
            for name in outside:
                _add_tar_member(archive, name, row)
            links = {"type": tarfile.SYMTYPE, "linkname": str(secret)}
            _add_tar_member(archive, "link.jsonl", **links)
            _add_tar_member(archive, "hard.jsonl", **{**links, "type": tarfile.LNKTYPE})
            _add_tar_member(archive, "pipe.jsonl", type=tarfile.FIFOTYPE)
    try:
        rows = [row for _, row in open_source(Inform(type="hf", data_files=str(folder))).rows()]
    except DataError:
        rows = []
    assert "secret" not in str(rows)
    assert not [*tmp_path.rglob("evil*")]


def test_rows_in_archives_read_nothing_outside(folder: Path, site: Site) -> None:
    addresses = ["../secret-x.png", f"{folder.parent}/secret-x.png", f"{site.url}/x.png", "x.png"]
    rows = "".join(json.dumps({"image": each, "label": 0}) + "\n" for each in addresses)
    with zipfile.ZipFile(folder / "rows.zip", "w") as archive:
        archive.writestr("rows.jsonl", rows)
        archive.writestr("x.png", png())
    with tarfile.open(folder / "rows.tar", "w") as archive:
        _add_tar_member(archive, "rows.jsonl", rows.encode())
    for name in ("zip", "tar"):
        inform = Inform(
            type="json", data_files=f"{name}://rows.jsonl::{folder}/rows.{name}", on_error="skip"
        )
        assert not [*documents(inform, schema=IMAGE_CLASSIFICATION)]
    assert not site.requests
