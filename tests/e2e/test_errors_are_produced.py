"""Every error class that can happen is produced by a test that names it; those that no part can raise yet are listed."""

import ast
import re
from pathlib import Path

import pytest

from firepool_wire.errors import TABLE

TESTS = Path(__file__).resolve().parents[1]

#: Class → a test that makes it happen and sees its name.
PRODUCED = {
    "UserError": "e2e/test_faults_results.py::test_a_payload_that_is_no_pickle_is_the_users_error",
    "NonZeroExit": "e2e/test_thread.py::test_commands_and_functions_run_in_pods_and_come_back",
    "Signaled": "e2e/test_faults_ends.py::test_a_crash_is_told_as_its_signal",
    "OOM": "e2e/test_faults_hostile.py::test_a_function_past_its_memory_is_out_of_memory",
    "GpuOOM": "e2e/test_faults_ends.py::test_what_torch_raises_without_device_memory_has_a_class_of_its_own",
    "RankFailed": "e2e/test_faults_ends.py::test_a_rank_that_fails_is_named_and_the_others_are_stopped",
    "PackageError": "e2e/test_faults_packages.py::test_an_archive_that_is_not_plain_files_is_refused_whole",
    "DependencyInstallError": (
        "e2e/test_faults_packages.py::test_a_requirement_that_does_not_exist_is_told_with_the_installers_words"
    ),
    "SerializationMismatch": "e2e/test_faults_results.py::test_a_payload_of_another_python_names_both_sides",
    "ResultTooLarge": "e2e/test_faults_results.py::test_a_result_over_the_pools_limit_is_refused_with_both_sizes",
    "ResultUnpicklable": "e2e/test_faults_results.py::test_a_result_that_cannot_be_pickled_is_named_by_its_type",
    "ImageNotAllowed": "e2e/test_faults_requests.py::test_an_image_that_is_not_on_the_allowlist_is_refused",
    "Cancelled": "e2e/test_faults_ends.py::test_a_cancelled_job_is_cancelled_when_its_processes_are_gone",
    "ClientGone": "e2e/test_faults_ends.py::test_a_job_ends_with_the_client_that_no_longer_renews_it",
    "QueueTimeout": "e2e/test_faults_ends.py::test_a_job_that_waits_too_long_says_what_it_waited_for",
    "StartTimeout": (
        "agent/test_timeouts.py::test_a_function_that_does_not_get_to_its_first_instruction_is_a_start_timeout"
    ),
    "RunTimeout": (
        "e2e/test_faults_hostile.py::test_a_function_that_never_ends_times_out_with_the_stacks_of_all_threads"
    ),
    "CapacityUnavailable": (
        "e2e/test_faults_requests.py::test_more_than_a_pool_can_ever_give_is_refused_with_the_limit"
    ),
    "QuotaExceeded": "e2e/test_faults_ends.py::test_more_than_a_callers_limit_can_ever_allow_is_refused",
    "TooManyRequests": "sdk/test_remote.py::test_a_full_queue_raises_too_many_requests",
    "HostLost": (
        "e2e/test_faults_losses.py"
        "::test_where_the_pool_allows_no_second_attempt_the_host_is_lost_and_it_is_not_the_users_fault"
    ),
    "IsolationUnavailable": "agent/test_nursery.py::test_what_it_cannot_give_is_refused_and_not_lowered",
    "BrokerUnavailable": "sdk/test_trouble.py::test_no_broker_is_a_typed_error_that_names_the_address",
    "StoreUnavailable": ("e2e/test_faults_losses.py::test_a_full_disk_refuses_new_jobs_and_loses_none_that_was_taken"),
    "Internal": "api/test_errors.py::test_an_unforeseen_exception_tells_the_client_an_incident_and_the_log_the_story",
    "UnknownSku": "e2e/test_faults_requests.py::test_an_unknown_pool_is_answered_with_those_there_are",
    "UnknownField": "e2e/test_faults_requests.py::test_an_unknown_field_is_named_with_its_path_and_the_nearest_one",
    "BadRequest": "e2e/test_faults_packages.py::test_bytes_that_are_not_their_digests_are_refused_at_the_door",
    "Unauthenticated": "e2e/test_faults_requests.py::test_without_a_good_token_nothing_is_answered",
    "Forbidden": "e2e/test_faults_requests.py::test_other_peoples_jobs_logs_and_blobs_do_not_exist",
    "NotFound": "e2e/test_faults_requests.py::test_other_peoples_jobs_logs_and_blobs_do_not_exist",
    "Conflict": "e2e/test_faults_requests.py::test_one_key_for_two_different_jobs_is_a_conflict",
    "PayloadTooLarge": "e2e/test_faults_requests.py::test_a_body_over_the_limit_is_refused_with_the_limit",
}

#: Class → what has to be built before it can happen.
NOT_YET = {
    "ImagePullError": "a provider that pulls images",
    "RayStartTimeout": "the topology ray",
    "Preempted": "capacity on loan",
    "Evicted": "nodes that are drained",
    "PolicyViolation": "policy rules",
    "SpendCapExceeded": "spend caps",
}


def test_every_class_of_the_table_is_produced_or_cannot_happen_yet() -> None:
    assert set(PRODUCED) | set(NOT_YET) == set(TABLE)
    assert not set(PRODUCED) & set(NOT_YET)


@pytest.mark.parametrize("code", PRODUCED)
def test_the_test_that_produces_it_exists_and_names_it(code: str) -> None:
    file, _, name = PRODUCED[code].partition("::")
    tree = ast.parse((TESTS / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    [found] = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
    assert code in ast.unparse(found), f"{PRODUCED[code]} does not look for {code}"


def test_what_cannot_happen_yet_is_raised_nowhere() -> None:
    houses = [TESTS.parent / h for h in ("broker/firepool_broker", "agent/firepool_agent", "firepool_ray")]
    text = "\n".join(file.read_text() for house in houses for file in house.rglob("*.py"))
    raised = [code for code in NOT_YET if re.search(rf"\b{code}\(|failure\(\"{code}\"", text)]
    assert not raised, "name the tests that produce them"
