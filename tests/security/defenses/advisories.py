"""Mutations of the rows about public advisories, by the test of a row."""

from __future__ import annotations

from tests.security.defenses.edits import (
    _ADMISSION,
    _WIRE,
    _WIRE_LINE,
    BAD_CHECKPOINTS,
    CLASSES,
    ESURGE,
    ESURGE_TESTS,
    INFRA,
    LAYERS,
    MODELS,
    Edit,
)

#: Test of a row -> the mutation of its defense.
ADVISORIES: dict[str, tuple[Edit, ...]] = {
    # ---- code in data
    f"{CLASSES}::test_only_listed_modules_unpickle": (
        Edit(
            _WIRE,
            _WIRE_LINE,
            f"{_WIRE_LINE}\n\ndef load(data):\n    import pickle\n    return pickle.loads(data)\n",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_wire.py::test_processes_with_different_secrets_reject_messages": (
        Edit(
            f"{ESURGE}/engine/channel.py",
            "if not hmac.compare_digest(code, self._code(sender, message)):",
            "if len(code) != _SIZE:",
        ),
    ),
    f"{BAD_CHECKPOINTS}::test_hostile_pickle_does_not_run_code": (
        Edit(
            f"{MODELS}/checkpoints/pickled_files.py",
            "known_class = _KNOWN.get((module, name))\n",
            "known_class = _KNOWN.get((module, name)) or super().find_class(module, name)\n",
        ),
    ),
    f"{CLASSES}::test_loading_a_configuration_runs_no_code": (
        Edit(
            f"{MODELS}/checkpoints/hub.py",
            "    stored = read_checkpoint_settings(path, task)\n",
            "    stored = read_checkpoint_settings(path, task)\n"
            "    for module in directory.glob('*_evil.py'):\n"
            "        exec(module.read_text())\n",
        ),
    ),
    f"{CLASSES}::test_fields_with_code_or_objects_are_rejected": (
        Edit(
            f"{ESURGE}/server/generation/requests.py",
            'custom_logit_processor: Annotated[\n        None, reject_field("code of clients; send '
            'logit_bias, allowed_token_ids or bad_words")\n    ] = None',
            "custom_logit_processor: Any = None",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_embedded_prompts.py"
    "::test_invalid_embeddings_are_rejected_with_value_bound_and_solution": (
        Edit(
            f"{ESURGE}/server/generation/prompt_embeds.py",
            "        tensors = deserialize(data)\n",
            "        import pickle\n"
            "        read = pickle.loads if data[:1] == b'\\x80' else deserialize\n"
            "        tensors = read(data)\n",
        ),
    ),
    f"{CLASSES}::test_no_module_evaluates_text_as_code": (
        Edit(_WIRE, _WIRE_LINE, f"{_WIRE_LINE}\n\ndef evaluate(text):\n    return eval(text)\n"),
    ),
    f"{CLASSES}::test_chat_template_cannot_access_the_interpreter": (
        Edit(
            f"{ESURGE}/template.py",
            "from ed_esurge.tokenizer import Tokenizer\n",
            "from ed_esurge.tokenizer import Tokenizer\nimport jinja2.sandbox as _box\n"
            "_box.SandboxedEnvironment.is_safe_attribute = lambda *each: True\n"
            "_box.ImmutableSandboxedEnvironment.is_safe_attribute = lambda *each: True\n"
            "_box.SandboxedEnvironment.is_safe_callable = lambda *each: True\n",
        ),
    ),
    # ---- requests
    f"{ESURGE_TESTS}/test_esurge_grammars.py"
    "::test_hostile_grammars_are_rejected_and_the_worker_survives": (
        Edit(
            f"{ESURGE}/grammars/limits.py",
            "    if depth > MAX_DEPTH:",
            "    if depth > MAX_DEPTH * 10**6:",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_grammars.py"
    "::test_compiled_grammars_are_shared_and_kept_while_in_use": (
        Edit(
            f"{ESURGE}/grammars/store.py",
            "while len(self._recent) > KEPT:",
            "while len(self._recent) > KEPT * 100:",
        ),
    ),
    f"{CLASSES}::test_every_numeric_request_field_has_bounds": (
        Edit(
            f"{ESURGE}/server/generation/requests.py",
            "    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None",
            "    top_k: int | None = None",
        ),
        Edit(
            f"{ESURGE}/sampling.py",
            "    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0",
            "    top_k: int = 0",
        ),
    ),
    f"{CLASSES}::test_empty_prompt_does_not_stop_the_server": (
        Edit(
            f"{ESURGE}/server/generation/requests.py",
            "        if not self.prompt and not self.prompt_embeds:",
            "        if False:",
        ),
    ),
    f"{CLASSES}::test_template_variables_cannot_replace_renderer_arguments": (
        Edit(
            f"{ESURGE}/server/generation/rendering.py",
            "reserved_names = sorted(options.variables.keys() & _RESERVED)",
            "reserved_names = sorted(options.variables.keys() & set())",
        ),
    ),
    f"{CLASSES}::test_every_tool_format_parses_hostile_text_completely": (
        Edit(
            f"{ESURGE}/replies/parser.py",
            "        self._src.feed(text)\n",
            "        self._src.feed(text)\n"
            "        __import__('re').match(r'(\\W+)*x{9}', text[:40])\n",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_attacks.py::test_expensive_requests_do_not_delay_other_requests": (
        Edit(
            f"{ESURGE}/server/http/body.py",
            "return await aside(lambda: validate_body(kind, _parse_body(raw), ignored), len(raw))",
            "return validate_body(kind, _parse_body(raw), ignored)",
        ),
    ),
    f"{CLASSES}::test_request_header_size_is_limited": (
        Edit(
            f"{ESURGE}/server/launch.py",
            "from __future__ import annotations\n",
            "from __future__ import annotations\n"
            "import uvicorn.protocols.http.h11_impl as _impl\n"
            "_impl.DEFAULT_MAX_INCOMPLETE_EVENT_SIZE = 10**9\n",
        ),
        Edit(_ADMISSION, "    if size > MAX_HEAD_BYTES:", "    if size > 10**9:"),
    ),
    f"{ESURGE_TESTS}/test_server_limits.py::test_forms_beyond_the_limits_are_rejected": (
        Edit(
            f"{ESURGE}/server/http/forms.py",
            "MAX_PARTS, MAX_HEADERS, MAX_HEADER = 64, 8, 1000",
            "MAX_PARTS, MAX_HEADERS, MAX_HEADER = 64, 10**9, 10**9",
        ),
    ),
    f"{CLASSES}::test_minimum_versions_of_http_libraries_are_fixed_releases": (
        Edit("packages/ed-esurge/pyproject.toml", '"starlette>=0.49.1"', '"starlette>=0.47.0"'),
    ),
    f"{CLASSES}::test_server_does_not_download_addresses_in_requests": (
        Edit(
            f"{ESURGE}/server/generation/images.py",
            "        if address.host not in self._domains:",
            "        if False:",
        ),
        Edit(
            f"{ESURGE}/server/generation/images.py",
            "if not (is_public(number) or number in self._domains):",
            "if False:",
        ),
    ),
    # ---- files
    "packages/ed-models/tests/test_gguf_header.py"
    "::test_damaged_headers_raise_checkpoint_errors_and_reserve_little_memory": (
        Edit(
            f"{MODELS}/checkpoints/gguf/header.py",
            "        if count > min(most, self.size // least):",
            "        if count > 2**63:",
        ),
        Edit(
            f"{MODELS}/checkpoints/gguf/header.py",
            "        if count > self.end - self.at:",
            "        if count < 0:",
        ),
    ),
    "packages/ed-models/tests/test_models_tensor_files.py"
    "::test_impossible_offsets_raise_checkpoint_error": (
        Edit(
            f"{MODELS}/checkpoints/tensor_files.py",
            "            not 8 + length <= entry.start <= entry.stop <= size\n",
            "            False\n",
        ),
    ),
    f"{BAD_CHECKPOINTS}::test_a_header_that_claims_more_than_the_file": (
        Edit(
            f"{MODELS}/checkpoints/tensor_files.py",
            "if length is None or length > min(size - 8, _MAX_HEADER):",
            "if length is None:",
        ),
    ),
    f"{BAD_CHECKPOINTS}::test_tokenizer_larger_than_vocabulary_raises_checkpoint_error": (
        Edit(
            f"{MODELS}/checkpoints/checks.py",
            "    if largest >= vocab_size:",
            "    if largest >= vocab_size * 2**40:",
        ),
    ),
    f"{BAD_CHECKPOINTS}::test_contradictory_config_raises_checkpoint_error": (
        Edit(
            f"{INFRA}/config/subclass.py",
            "        if value > LARGEST.get(common, value):",
            "        if value > LARGEST.get(common, value) * 10**20:",
        ),
    ),
    f"{BAD_CHECKPOINTS}::test_oversized_index_and_tokenizer_are_rejected_before_reading": (
        Edit(
            f"{MODELS}/checkpoints/tensor_files.py",
            "    if index.stat().st_size > _MAX_HEADER:",
            "    if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_attacks.py::test_compressed_bodies_and_forms_are_rejected": (
        Edit(f"{ESURGE}/server/http/body.py", '    if encoding != "identity":', "    if False:"),
    ),
    # ---- access
    f"{CLASSES}::test_path_and_host_variants_do_not_bypass_the_key_check": (
        Edit(
            f"{ESURGE}/server/http/auth.py",
            'or scope["path"] in self._open_paths',
            "or any(p in f\"{scope['path']}?{scope['query_string'].decode()}\" "
            "for p in self._open_paths)",
        ),
    ),
    f"{CLASSES}::test_keys_are_compared_as_digests_in_constant_time": (
        Edit(
            f"{ESURGE}/server/http/auth.py",
            "if hmac.compare_digest(digest, one.digest)",
            "if digest == one.digest",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_attacks.py::test_foreign_host_headers_return_421": (
        Edit(
            _ADMISSION,
            "        if self.hosts is not None and host not in self.hosts:",
            "        if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_isolation.py"
    "::test_cached_tokens_reveal_prompts_only_with_shared_prefixes": (
        Edit(
            f"{ESURGE}/server/generation/models.py",
            'options["cache_salt"] = f"{self.owner}:{salt or \'\'}"',
            'options["cache_salt"] = salt or ""',
        ),
    ),
    f"{CLASSES}::test_prefix_key_depends_on_every_token_and_the_salt": (
        Edit(
            f"{ESURGE}/core/prefix_cache.py",
            'content = previous_key + array("q", tokens).tobytes() + items',
            'content = previous_key + array("q", tokens[:1]).tobytes() + items',
        ),
    ),
    f"{CLASSES}::test_uploaded_file_names_are_not_used_as_paths": (
        Edit(
            f"{ESURGE}/server/stores.py",
            '        path = self._root / "files" / f"{uuid.uuid4().hex}.part"\n',
            '        path = self._root / "files" / f"{uuid.uuid4().hex}.part"\n'
            "        (self._root / 'files' / '../../escaped.jsonl').touch()\n",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_adapters.py"
    "::test_adapter_paths_outside_the_directory_are_rejected": (
        Edit(
            f"{ESURGE}/server/operations/admin.py",
            "    if not within or strays:",
            "    if False:",
        ),
    ),
    f"{LAYERS}/tests/test_layers_native_boundary.py::test_every_target_refuses_damaged_calls": (
        Edit(f"{LAYERS}/native/checks.h", "    if (!same)\n", "    if (false)\n"),
        Edit(  # a faster build
            f"{LAYERS}/src/ed_layers/native/build.py",
            'target: Path = LIBRARY, optimize: str = "-O3"',
            'target: Path = LIBRARY, optimize: str = "-O0"',
        ),
    ),
}
