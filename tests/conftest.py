"""What all tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.mutants.faults import FAULTS

# What `make test` leaves out: commands from end to end, browsers, killed processes, the proofs of the methods that the
# four papers compare with.
SLOW = (
    "tests/cli/",
    "tests/data/test_large.py",
    "tests/data/test_real.py",
    "tests/data/test_foreign_files.py",
    "tests/model_files/",
    "tests/sites/",
    "tests/fuzz/",
    "tests/kills/",
    "tests/training/test_device.py",
    "tests/training/test_isolation.py",
    "tests/methods/",
    "tests/models/",
    "tests/reporting/",
    "tests/server/test_interruptions.py",
    "tests/server/test_run_directories.py",
    "tests/server/test_runs.py",
    "tests/studies/",
    "tests/test_api.py",
    "tests/test_benchmarks.py",
    "tests/test_examples.py",
    "tests/test_testing.py",
    "tests/test_wall.py",
    "tests/engines/test_memory.py",
    "tests/engines/test_processes.py",
    "tests/engines/test_ray.py",
)
# Of these, all the same: what finds a kept fault, what the four papers propose, at least one way through each part.
KEPT = (
    *{fault.test.partition(" ")[0] for fault in FAULTS},
    "tests/sites/test_joining.py",
    "tests/sites/test_letters.py",
    "tests/sites/test_secure.py::test_every_method_with_means_has_the_plain_means_and_no_upload_reaches_the_server[fedavg]",
    "tests/sites/test_ledger.py::test_a_new_name_of_a_run_buys_no_more_trainings",
    "tests/methods/test_costs.py",
    "tests/methods/test_fedacs.py",
    "tests/methods/test_new_clients.py",
    "tests/methods/test_pfedmb.py",
    "tests/methods/test_pflego.py",
    "tests/methods/test_pgfed.py",
    "tests/methods/test_common.py::test_common_suite[fedavg-",
    "tests/methods/test_common.py::test_common_suite[pgfed-",
    "tests/test_wall.py::test_a_spy_at_the_server_gets_nothing[memory-engine0",
    "tests/cli/test_bad_input.py::test_a_name_that_does_not_exist_gets_the_nearest_that_does",
    "tests/cli/test_commands.py::TestPipes",  # a process of its own
    "tests/cli/test_commands.py::TestRun::test_one_method_is_recorded_in_a_numbered_directory",
    "tests/cli/test_names_of_strangers.py::test_run_show_and_watch",
    "tests/data/test_foreign_files.py::test_odd_tables_are_refused",
    "tests/engines/test_processes.py::test_no_worker_survives_a_run_or_an_interruption",
    "tests/engines/test_ray.py::test_tensors_of_all_kinds_arrive_as_copies",
    "tests/engines/test_ray.py::test_sites_arrive_with_each_piece_of_memory_once",
    "tests/model_files/test_exporting.py::test_predictions_are_the_models_own",
    "tests/model_files/test_exporting.py::test_three_lines_of_plain_pytorch_give_the_accuracy_that_the_run_recorded[fedper",
    "tests/models/test_building.py",
    "tests/models/test_networks.py",
    "tests/reporting/test_latex.py",
    "tests/reporting/test_page.py::test_the_page_is_one_small_file_that_loads_nothing",
    "tests/reporting/test_tables.py::TestNumbers::test_accuracy_is_the_mean_over_seeds",
    "tests/reporting/test_tables.py::TestSignificance::test_holm_by_hand",
    "tests/server/test_interruptions.py::test_an_interruption_anywhere_changes_no_number[False-send-memory]",
    "tests/server/test_runs.py::test_a_run_directory_holds_everything",
    "tests/studies/test_deciding_metric.py::TestAdvice::test_a_race_on_numbers[mae",
    "tests/studies/test_comparison.py::TestWork::test_all_methods_have_the_same_clients_and_participants",
    "tests/studies/test_reproduction.py::test_seeds_give_a_spread_and_fewer_rounds_are_said",
    "tests/studies/test_tuning.py::TestClosedForm::test_the_better_of_two_settings_is_found",
)
# Of the cases of these tests, others repeat on a larger scale what those that are named here show.
REPEATED = {
    "test_common.py::test_common_suite[pgfed-ce-": (),
    "test_early_stopping.py::test_a_run_that_was_interrupted_stops_in_the_same_round": ("[3]",),
    "test_early_stopping.py::test_it_is_the_beginning_of_the_run_without_it": ("[2]",),
    "test_hospitals.py::test_every_hospital_can_join": ("[harbour]",),
    "test_hostile.py::test_a_killed_run_goes_on_to_the_same_bits": ("[replay]",),
    "test_hostile.py::test_all_engines_give_the_same_bits": ("[little]", "[nan]", "[replay]"),
    "test_hostile.py::test_every_method_under_attack": ("[fedavg]", "[local]", "[pgfed]"),
    "test_joining.py::TestNumbers::test_the_same_bits_on_every_engine_and_after_a_stop": ("[pgfed]", "[scaffold]"),
    "test_joining.py::test_tables_and_figures_say_so": ("[local]", "[pgfed]"),
    "test_leak.py::test_every_attack_copies_one_sample": ("[cosine]",),
    "test_membership.py::test_a_client_is_hidden_as_epsilon_says": ("[1.0]",),
    "test_membership.py::test_a_sample_is_hidden_as_epsilon_says": ("[1.0]",),
    "test_missing.py::test_a_client_that_is_silent_in_one_evaluation_changes_nothing_else": ("[fedavg]", "[ditto]"),
    "test_missing.py::test_a_resumed_run_knows_who_is_missing": ("[4-",),
    "test_package.py::test_a_run_needs_no_extra_and_no_scikit_learn": (),
    "test_pfedmb.py::test_agrees_with_a_second_implementation": ("{'branches': 3}-", "'momentum'"),
    "test_missing.py::test_metrics_that_are_none_count_as_a_failure": ("[fedper-",),
    "test_results.py::test_a_page_is_what_the_records_give": ("[leaderboard",),
    "test_robust_runs.py::test_every_method_takes_a_rule_or_says_why_not": ("[fedavg]", "[ifca]", "[pgfed]"),
    "test_robust_runs.py::test_the_same_bits_on_every_engine_and_after_a_resume": ("[fedavg-",),
    "test_sample_level.py::test_queries_are_counted_without_samples": ("[fedavg]", "[pflego]", "[apfl]"),
    "test_sample_level.py::test_the_same_bits_on_every_engine_and_after_resuming": ("[apfl]", "[fedavg]"),
    "test_torch_optim.py::test_a_schedule_within_a_round_is_that_of_torch": ("float64",),
    "test_torch_optim.py::test_fifty_steps_are_those_of_torch": ("float64]",),
}


def is_slow(test: str) -> bool:
    """Find out from its node id whether a test is not among the fast ones."""
    if test.startswith(SLOW) and not any(words in test for words in KEPT):
        return True
    cases = (fast for name, fast in REPEATED.items() if "[" in test and name in test)
    return any(not any(case in test for case in fast) for fast in cases)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out whole files that are slow: importing them takes long."""
    if not config.option.markexpr.startswith("not slow") or collection_path.is_dir():
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if path.startswith(SLOW) and not any(words.startswith(path) for words in KEPT) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small work on many threads is slow, and the tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
