"""Mutations of the rows about attacks found on this project, by the test of a row."""

from __future__ import annotations

from tests.security.defenses.edits import (
    _ADMISSION,
    _WIRE,
    DATA,
    ELARGE,
    ESURGE,
    ESURGE_TESTS,
    INFRA,
    MODELS,
    TRAINERS,
    Edit,
)

#: Test of a row -> the mutation of its defense.
ATTACKS: dict[str, tuple[Edit, ...]] = {
    # ---- requests that hold resources
    f"{ESURGE_TESTS}/test_server_metric_labels.py"
    "::test_metrics_have_a_limited_size_after_every_possible_request": (
        Edit(
            f"{ESURGE}/server/metrics.py",
            'if route is not None and scope["method"] in route.methods:',
            "if route is not None:",
        ),
        Edit(_ADMISSION, "    if method not in HTTP_METHODS:", "    if False:"),
    ),
    f"{ESURGE_TESTS}/test_server_public_addresses.py"
    "::test_addresses_of_private_kinds_are_not_public": (
        Edit(
            f"{ESURGE}/server/http/public_addresses.py",
            "return not any(address in network for network in _RESERVED_V4)",
            "return True",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_extreme_numbers.py"
    "::test_extreme_keep_alive_is_answered_or_rejected": (
        Edit(
            f"{ESURGE}/server/activity.py",
            "        if value > MAX_SECONDS:",
            "        if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_metadata.py::test_metadata_beyond_the_limits_is_refused": (
        Edit(
            f"{ESURGE}/server/http/fields.py",
            "MAX_VALUE_CHARACTERS = 16, 64, 512",
            "MAX_VALUE_CHARACTERS = 16000, 64000, 512000",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_answer_sizes.py"
    "::test_large_answers_are_refused_before_the_engine_receives_the_request": (
        Edit(
            f"{ESURGE}/server/generation/answer_size.py",
            "        if size > self.most:",
            "        if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_unread_answers.py"
    "::test_connections_without_a_tls_handshake_count_and_end": (
        Edit(
            f"{ESURGE}/server/http/connections.py",
            "if len(self._open) >= self.most and not self._evict_idle(now):",
            "if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_unread_answers.py::test_unread_answers_end_after_the_time_limit": (
        Edit(
            f"{ESURGE}/server/http/connections.py",
            "        return read - previous_read < LOWEST_RATE * (now - since)",
            "        return False",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_unread_answers.py"
    "::test_one_of_several_keys_takes_at_most_half_of_the_requests": (
        Edit(
            f"{ESURGE}/server/http/auth.py",
            "share = max(1, max_requests // 2) if has_several_keys else None",
            "share = None",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_response_memory.py"
    "::test_concurrent_background_requests_do_not_exceed_their_limit": (
        Edit(
            f"{ESURGE}/server/detached.py", "        if count >= self._most:", "        if False:"
        ),
    ),
    f"{ESURGE_TESTS}/test_server_batch_quotas.py"
    "::test_results_beyond_the_storage_of_the_owner_end_the_batch": (
        Edit(
            f"{ESURGE}/server/batches/worker.py",
            "        if self._is_full and not cancelled:",
            "        if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_mcp_attacks.py::test_invalid_arguments_fail_only_their_call": (
        Edit(
            f"{ESURGE}/server/mcp_servers.py",
            "        if not isinstance(values, dict):",
            "        if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_mcp_attacks.py"
    "::test_dying_tool_interrupts_no_call_of_another_key": (
        Edit(f"{ESURGE}/server/mcp_servers.py", "key = label, owner\n", "key = label, ''\n"),
    ),
    f"{ESURGE_TESTS}/test_esurge_forged_certificates.py::test_forged_certificate_is_not_shown": (
        Edit(
            f"{ESURGE}/certificates.py",
            "            elif digest != hashes[file.name]:",
            "            elif False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_adapters.py"
    "::test_adapter_belongs_to_the_owner_whose_load_succeeded": (
        Edit(
            f"{ESURGE}/server/operations/admin.py",
            "    name = body.lora_name\n    async with model.adapter_lock:",
            "    name = body.lora_name\n    if True:",
        ),
    ),
    # ---- work that grows with the square of a request, or stops the interpreter
    f"{ESURGE_TESTS}/test_server_cheap_requests.py"
    "::test_long_texts_are_decoded_without_the_lock_of_the_interpreter": (
        Edit(
            f"{ESURGE}/tokenizer.py",
            "    if len(tokens) < LONG_DECODING or",
            "    if len(tokens) >= 0 or",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_cheap_requests.py::test_long_texts_grow_without_copies": (
        Edit(f"{ESURGE}/outputs.py", '    setattr(owner, name, "")\n', ""),
    ),
    f"{ESURGE_TESTS}/test_server_cheap_requests.py"
    "::test_results_of_many_ollama_calls_are_matched_in_linear_time": (
        Edit(
            f"{ESURGE}/frontends/ollama/requests.py",
            "        for calls in (named, self._all):\n",
            "        for _ in range(8):\n"
            "            self._all = deque(one for one in self._all if one[0] not in self._taken)\n"
            "        for calls in (named, self._all):\n",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_text.py"
    "::test_repeated_text_is_searched_for_stop_strings_in_linear_time": (
        Edit(
            f"{ESURGE}/tokenizer.py",
            "        if (self._inside, check) != self._searched:",
            "        if True:",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_text.py::test_tokens_without_text_are_read_in_linear_time": (
        Edit(
            f"{ESURGE}/tokenizer.py",
            "        if len(self._ids) - self._done > LONG_WAIT:",
            "        if False:",
        ),
    ),
    "packages/ed-infra/tests/test_infra_conversation.py"
    "::test_many_messages_of_one_role_are_merged_in_linear_time": (
        Edit(
            f"{INFRA}/conversation.py",
            "                groups[-1].append(message)\n",
            "                groups[-1] = [_merge([*groups[-1], message])]\n",
        ),
    ),
    # ---- rows, run files and locks
    "packages/ed-data/tests/test_data_media_rows.py"
    "::test_rows_read_nothing_outside_of_their_data_set": (
        Edit(
            f"{DATA}/rows/media_files.py",
            "inside = [full for full in candidates if _is_inside(full, self._roots)]",
            "inside = list(candidates)",
        ),
        Edit(
            f"{DATA}/rows/media_files.py",
            "if _is_inside(real, self._roots) and os.path.isfile(real):",
            "if os.path.isfile(real):",
        ),
    ),
    "packages/ed-data/tests/test_data_media_rows.py"
    "::test_a_file_that_became_a_link_a_pipe_or_large_is_not_read": (
        Edit(f"{DATA}/media_access.py", "    if os.path.realpath(path) != path:", "    if False:"),
        Edit(f"{DATA}/media_access.py", 'getattr(os, "O_NOFOLLOW", 0)', "0"),
    ),
    "packages/ed-data/tests/test_data_media_rows.py"
    "::test_listed_names_with_private_addresses_are_not_requested": (
        Edit(
            f"{DATA}/media_access.py",
            "if not (is_public(number) or number in names):",
            "if False:",
        ),
    ),
    "packages/ed-data/tests/test_data_long_lines.py"
    "::test_compressed_file_that_expands_is_an_error_with_its_name": (
        Edit(
            f"{DATA}/sources/expansion.py",
            "        if self._count > FREE_BYTES and self._count > MAX_RATIO",
            "        if self._count < 0 and self._count > MAX_RATIO",
        ),
    ),
    "packages/ed-data/tests/test_data_long_lines.py"
    "::test_archive_without_a_readable_file_is_an_error_with_its_name": (
        Edit(
            f"{DATA}/sources/formats.py",
            "        except (ArithmeticError, LookupError, RuntimeError, ValueError, struct.error)",
            "        except struct.error",
        ),
    ),
    "packages/ed-data/tests/test_data_long_lines.py"
    "::test_expanding_page_is_an_error_with_its_column": (
        Edit(
            f"{DATA}/sources/expansion.py",
            "        if size > FREE_BYTES and size > MAX_RATIO * stored:",
            "        if False:",
        ),
    ),
    "packages/ed-data/tests/test_data_long_lines.py"
    "::test_entries_of_a_dictionary_are_not_copied_into_all_rows_at_once": (
        Edit(
            f"{DATA}/sources/expansion.py",
            "    if not any(_expands(field.type) for field in batch.schema):",
            "    if True:",
        ),
    ),
    "packages/ed-data/tests/test_data_audio.py::test_extreme_headers_are_errors_of_their_row": (
        Edit(
            f"{DATA}/rows/recordings.py",
            "    if not RATES[0] <= recording_header.rate <= RATES[1]:",
            "    if False:",
        ),
    ),
    "packages/ed-data/tests/test_data_media_rows.py"
    "::test_archives_of_a_dataset_read_and_write_nothing_outside": (
        Edit(  # archives are read in place; Python extracts them to any path
            f"{DATA}/sources/hub.py",
            "    builder = datasets.load_dataset_builder(dataset_id, config)\n",
            "    import pathlib, tarfile\n"
            "    for path in pathlib.Path(dataset_id).glob('*.tar*'):\n"
            "        with tarfile.open(path) as archive:\n"
            "            archive.extraction_filter = tarfile.fully_trusted_filter\n"
            "            archive.extractall(dataset_id)\n"
            "    builder = datasets.load_dataset_builder(dataset_id, config)\n",
        ),
    ),
    "packages/ed-data/tests/test_data_media_rows.py"
    "::test_cards_of_datasets_name_only_their_own_files": (
        Edit(
            f"{DATA}/sources/hub.py",
            "            raise _outside(label, dataset_id, file)",
            "            pass",
        ),
        Edit(
            f"{DATA}/sources/hub.py",
            "            raise _outside(label, dataset_id, name)",
            "            pass",
        ),
    ),
    "tests/security/test_media_rows.py"
    "::test_minimum_version_of_fsspec_runs_no_code_of_references": (
        Edit("packages/ed-data/pyproject.toml", '"fsspec>=2026.6"', '"fsspec>=2025.3"'),
    ),
    "packages/ed-elarge/tests/test_elarge_hostile_run_files.py::test_nested_merges_are_read_once": (
        Edit(
            f"{ELARGE}/config/nodes.py",
            "stored_keys = self._merges.get(id(source))",
            "stored_keys = None",
        ),
    ),
    "packages/ed-elarge/tests/test_elarge_hostile_run_files.py"
    "::test_unfinished_variables_are_read_in_linear_time": (
        Edit(
            f"{ELARGE}/config/nodes.py",
            r"(:-(?:[^}$]|\$(?!\{))*)?",
            r"(:-[^}]*)?",
        ),
    ),
    "packages/ed-elarge/tests/test_elarge_hostile_run_files.py"
    "::test_long_model_types_are_errors_of_the_run_file": (
        Edit(
            f"{ELARGE}/config/config_source.py",
            "    while folder and len(folder) <= _MAX_NAME:",
            "    while folder:",
        ),
    ),
    "packages/ed-elarge/tests/test_elarge_hostile_names.py::test_slurm_script_runs_only_elarge": (
        Edit(
            f"{ELARGE}/launch/slurm.py",
            "directory=shlex.quote(str(job.directory)),",
            "directory=str(job.directory),",
        ),
    ),
    "packages/ed-models/tests/test_models_gguf_expanding_vocabulary.py"
    "::test_unknown_words_are_encoded_or_the_vocabulary_is_an_error": (
        Edit(
            f"{MODELS}/checkpoints/gguf/vocabulary.py",
            "    if unknown not in vocab:  # the tokenizer",
            "    if False:  # the tokenizer",
        ),
    ),
    "packages/ed-models/tests/test_models_gguf_expanding_vocabulary.py"
    "::test_tokens_with_many_cuts_are_an_error_before_merges_are_stored": (
        Edit(
            f"{MODELS}/checkpoints/gguf/vocabulary.py",
            "_MAX_MERGES, _MAX_CHARACTERS = 6, 8",
            "_MAX_MERGES, _MAX_CHARACTERS = 6 * 10**6, 8 * 10**6",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_answer_sizes.py"
    "::test_bytes_of_growing_answers_are_in_flight_until_the_answer_ends": (
        Edit(
            f"{ESURGE}/server/generation/answer_size.py",
            "            self._reservation.add(self._scope, target - self._reserved)",
            "            pass",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_batch_quotas.py"
    "::test_small_batch_of_another_key_ends_during_a_large_batch": (
        Edit(
            f"{ESURGE}/server/batches/worker.py",
            "MAX_OWNERS, TURN_SECONDS = 16, 60.0",
            "MAX_OWNERS, TURN_SECONDS = 1, 60.0",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_batch_quotas.py"
    "::test_free_slots_go_to_the_owner_with_the_fewest_running_lines": (
        Edit(
            f"{ESURGE}/server/batches/worker.py",
            "place = min(self._waiting, key=lambda entry: self._running[entry[0]])",
            "place = self._waiting[0]",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_batch_quotas.py"
    "::test_batch_without_room_for_its_files_is_rejected": (
        Edit(
            f"{ESURGE}/server/stores.py",
            "        if count >= self.limits.max_files:",
            "        if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_cheap_requests.py::test_requests_do_not_copy_the_vocabulary": (
        Edit(
            f"{ESURGE}/template.py",
            "    copy = type(original)(original.model)\n",
            "    copy = type(original).from_str(original.to_str())\n",
        ),
        Edit(
            f"{ESURGE}/server/generation/infilling.py",
            "    token = tokenizer.convert_tokens_to_ids(name)\n",
            "    token = tokenizer.get_vocab().get(name)\n",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_cheap_requests.py"
    "::test_document_is_created_once_for_all_requests": (
        Edit(f"{ESURGE}/server/openapi.py", "@cache\ndef _render(", "def _render("),
    ),
    f"{ESURGE_TESTS}/test_server_damaged_folders.py::test_lists_contain_the_healthy_models": (
        Edit(
            f"{ESURGE}/frontends/ollama/model_facts.py",
            "        except (EasyDeLError, OSError) as error:",
            "        except KeyError as error:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_damaged_folders.py::test_lists_read_unchanged_folders_once": (
        Edit(
            f"{ESURGE}/frontends/library/checkpoint_files.py",
            "            if entry is None or entry[0] != signature:",
            "            if True:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_damaged_folders.py"
    "::test_damaged_model_returns_an_error_without_paths": (
        Edit(
            f"{ESURGE}/server/http/errors.py",
            "    text = str(error)\n    for folder in folders:",
            "    return str(error)\n    for folder in folders:",
        ),
    ),
    **{
        f"packages/ed-trainers/tests/test_trainers_run_lock.py::{name}": (
            Edit(
                f"{TRAINERS}/checkpoints/run_lock.py",
                "        deadline = time.monotonic() + ENDING_SECONDS\n",
                "        return\n        deadline = time.monotonic() + ENDING_SECONDS\n",
            ),
        )
        for name in (
            "test_second_process_is_refused_and_names_the_first",
            "test_trainer_changes_no_file_of_a_live_run",
            "test_renewals_and_not_clocks_decide_about_locks_of_other_hosts",
        )
    },
    "packages/ed-infra/tests/test_infra_mesh.py"
    "::test_compiled_functions_in_a_forked_child_raise_at_once": (
        Edit(
            f"{INFRA}/forked_children.py",
            "    os.register_at_fork(after_in_child=_refuse_programs)\n",
            "",
        ),
    ),
    "packages/ed-trainers/tests/test_trainers_mirror.py"
    "::test_mirror_that_fills_keeps_earlier_copies_and_no_partial_one": (
        Edit(
            f"{TRAINERS}/checkpoints/mirror.py",
            "                    self._remove(step)",
            "                    pass",
        ),
    ),
    # ---- pictures, templates and stored responses
    "tests/security/test_image_attacks.py"
    "::test_jpeg_of_too_many_scans_is_refused_before_decoding": (
        Edit(
            f"{ESURGE}/pictures/decoder_worker.py",
            "            if count > MAX_SCANS:",
            "            if count > 10**9:",
        ),
    ),
    "tests/security/test_image_attacks.py::test_decoding_ends_when_the_client_leaves": (
        Edit(
            f"{ESURGE}/children/process.py",
            "        group.cancel()\n        raise",
            "        raise",
        ),
    ),
    "tests/security/test_image_attacks.py"
    "::test_narrow_pictures_are_refused_before_they_are_enlarged": (
        Edit(
            f"{ESURGE}/server/generation/images.py",
            "    if long > most * short:",
            "    if long > most * short * 10**6:",
        ),
    ),
    "tests/security/test_template_attacks.py::test_variables_that_a_template_repeats_are_limited": (
        Edit(
            f"{ESURGE}/server/generation/rendering.py",
            "    if size * messages > MAX_REPEATED:",
            "    if False:",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_answer_sizes.py"
    "::test_long_answers_are_written_by_a_thread_in_short_pieces": (
        Edit(
            f"{ESURGE}/server/http/json_parts.py",
            "    if size < LONG_ANSWER:\n        return [",
            "    if size >= 0:\n        return [",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_response_memory.py"
    "::test_bytes_of_background_responses_are_counted_until_and_after_their_end": (
        Edit(
            f"{ESURGE}/server/detached.py",
            "        return self.size if self.events else 0",
            "        return 0",
        ),
    ),
    f"{ESURGE_TESTS}/test_server_response_memory.py"
    "::test_conversations_share_their_messages_and_have_a_limit": (
        Edit(
            f"{ESURGE}/server/responses/run.py",
            "        if self.size > state.limits.max_conversation_bytes:",
            "        if False:",
        ),
    ),
    "tests/security/test_template_attacks.py"
    "::test_endless_template_of_a_checkpoint_is_interrupted": (
        Edit(
            f"{ESURGE}/render_time.py",
            "                    if _read_time(entry.thread) > entry.end:",
            "                    if False:",
        ),
    ),
    "tests/security/test_template_attacks.py::test_hostile_templates_return_short_errors": (
        Edit(  # the child limits its time, and the server the time that it waits for the child
            f"{ESURGE}/untrusted_template.py",
            "ChildLimits(cpu, memory, WALL_SECONDS)",
            "ChildLimits(1000.0, memory, 1000.0)",
        ),
    ),
    "packages/ed-elarge/tests/test_elarge_member_folders.py"
    "::test_copies_of_a_live_launch_stay_and_those_of_an_ended_one_go": (
        Edit(f"{ELARGE}/launch/member.py", " and not _is_locked(launch):", ":"),
    ),
    "packages/ed-data/tests/test_data_media_rows.py::test_features_of_datasets_are_not_decoded": (
        Edit(
            f"{DATA}/sources/hub.py",
            '            for batch in data.with_format("arrow").iter(batch_size=_ROWS):\n'
            '                table = cast("pa.Table", batch)\n',
            "            import pyarrow\n"
            "            for batch in data.with_format(None).iter(batch_size=_ROWS):\n"
            "                table = pyarrow.table(batch)\n",
        ),
        Edit(
            f"{DATA}/sources/hub.py",
            '        data = self._data.with_format("arrow")',
            "        data = self._data.with_format(None)",
        ),
    ),
    # ---- replicas and workers
    f"{ESURGE_TESTS}/test_esurge_processes.py::test_connection_without_the_secret_is_rejected": (
        Edit(
            f"{ESURGE}/engine/channel.py",
            "if not hmac.compare_digest(code, self._code(sender, message)):",
            "if len(code) != _SIZE:",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_listener.py"
    "::test_more_strangers_than_files_do_not_end_the_listener": (
        Edit(
            f"{ESURGE}/engine/listener.py",
            "                if not self._closed.is_set():\n                    self._warn",
            "                return\n                if not self._closed.is_set():\n"
            "                    self._warn",
        ),
        Edit(f"{ESURGE}/engine/listener.py", "MAX_PENDING = 32", "MAX_PENDING = 10**6"),
    ),
    f"{ESURGE_TESTS}/test_esurge_listener.py::test_slow_greeting_ends_at_one_deadline": (
        Edit(
            f"{ESURGE}/engine/connection.py",
            "                    if remaining <= 0:\n",
            "                    remaining = GREETING_SECONDS\n"
            "                    if remaining <= 0:\n",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_listener.py::test_ends_of_different_versions_reject_each_other": (
        Edit(
            f"{ESURGE}/engine/connection.py", "    if there == local_versions:\n", "    if there:\n"
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_lying_replicas.py"
    "::test_lie_of_a_replica_ends_its_connection_and_no_request": (
        Edit(
            f"{ESURGE}/processes/answer_check.py",
            '        require(are_valid, "a token outside the vocabulary")\n        tokens',
            "        tokens",
        ),
    ),
    f"{ESURGE_TESTS}/test_esurge_lying_replicas.py"
    "::test_hostile_frame_of_a_replica_ends_its_connection": (
        Edit(_WIRE, "        if depth == _MAX_DEPTH:", "        if depth < 0:"),
    ),
    "packages/ed-elarge/tests/test_elarge_lying_workers.py::test_invalid_results_are_rejected": (
        Edit(
            f"{ELARGE}/asynchronous/message_check.py",
            '        _require(is_valid, "a token outside the vocabulary")\n',
            "",
        ),
    ),
    "packages/ed-infra/tests/test_infra_messages.py"
    "::test_long_messages_keep_their_beginning_and_end": (
        Edit(f"{INFRA}/errors.py", "MAX_MESSAGE = 2**15", "MAX_MESSAGE = 2**40"),
    ),
}
