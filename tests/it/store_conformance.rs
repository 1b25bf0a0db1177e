//! What every store promises, as cases that run on each of them.
//!
//! A store joins with a module here that says `conformance!(suite, super::fresh)`, where `fresh`
//! gives a fresh store and a raw connection to its database. A case that is not in the list is dead
//! code to the compiler. Leases and validities of zero are over at once, so hardly any case waits.

mod claims;
pub mod fixture;
pub mod intents;
mod model;
mod operators;
mod outbox_claims;
mod outbox_ends;
mod outbox_operators;
mod postgres;
mod remembered;
mod rows;
mod run_changes;
pub mod run_fixture;
mod run_reads;
mod run_retention;
mod runs;
mod settling;
mod sqlite;
mod time;
mod whole;

/// Runs every case on a store, as the tests of a module `$module`.
macro_rules! conformance {
    ($module:ident, $fixture:path) => {
        conformance!(@ $module, $fixture, [
            claims::one_of_many_concurrent_claims_wins,
            claims::one_of_many_claims_in_a_batch_wins,
            claims::a_claim_sent_again_after_a_lost_reply_is_won_again,
            claims::a_claim_sent_again_after_its_lease_was_swept_is_not_won,
            claims::a_lost_claim_is_shown_the_record,
            claims::answers_stand_in_the_order_of_what_was_asked,
            claims::tenant_pool_and_key_each_make_another_record,
            claims::one_of_many_concurrent_reclaims_wins,
            claims::a_reclaim_sent_again_after_a_lost_reply_is_won_again,
            claims::only_a_failed_or_expired_record_is_reclaimed,
            claims::a_reclaim_of_another_token_than_seen_is_refused,
            claims::a_failed_record_keeps_its_generation_and_what_may_have_been_sent,
            claims::an_expired_record_begins_a_new_generation,
            claims::a_reclaim_stamps_its_own_terms_and_fingerprint,
            settling::a_decision_is_told_again_byte_for_byte,
            settling::a_kept_empty_body_is_not_a_body_that_was_not_kept,
            settling::a_body_of_a_mebibyte_is_kept,
            settling::a_completion_sent_again_gets_the_same_answer,
            settling::a_second_decision_is_stale,
            settling::a_late_completion_is_taken_from_every_open_state,
            settling::a_stale_token_writes_nothing_anywhere,
            settling::duplicates_in_a_batch_count_as_if_one_by_one,
            settling::a_release_leads_where_the_owner_says,
            settling::a_release_sent_again_gets_the_same_answer,
            settling::only_who_is_certain_releases_an_unknown_outcome,
            settling::what_may_have_been_sent_is_never_forgotten_within_a_generation,
            settling::a_heartbeat_extends_a_lease_that_nobody_swept,
            settling::a_heartbeat_is_refused_once_the_record_is_not_pending,
            time::a_lease_is_held_and_then_over,
            time::a_validity_ends_and_a_tombstone_follows,
            time::the_sweep_follows_the_terms_on_the_row,
            time::the_sweep_leaves_a_held_lease_alone,
            time::the_sweep_moves_no_more_than_it_is_told,
            time::one_of_many_sweeps_moves_a_record,
            time::a_row_without_a_lease_is_never_swept,
            time::retention_deletes_what_is_past_its_time_in_pages,
            time::retention_never_touches_what_is_open,
            time::retention_keeps_a_record_through_its_tombstone,
            time::a_purged_key_gets_a_generation_that_never_was,
            time::the_census_counts_what_is_open,
            rows::a_row_inserted_by_hand_is_read,
            rows::a_completed_row_without_a_decision_is_an_error_that_names_it,
            rows::names_with_every_allowed_character_stay_apart,
            operators::records_are_found_by_each_condition,
            operators::a_search_is_paged_without_gaps,
            operators::a_search_tells_the_status_of_the_stored_answer,
            operators::an_unknown_outcome_is_resolved_and_audited,
            operators::a_record_whose_owner_is_at_work_is_not_resolved,
            operators::it_never_happened_is_refused_too_early,
            operators::a_row_without_a_lease_is_resolved,
            operators::a_resolution_with_a_stale_token_writes_nothing,
            operators::one_record_is_purged_and_audited,
            operators::an_open_record_is_not_purged,
            runs::a_decision_and_its_run_are_committed_whole,
            runs::a_stale_token_starts_no_run,
            runs::a_decision_sent_again_starts_one_run,
            runs::some_decisions_of_a_batch_start_runs,
            runs::a_first_tick_may_end_a_run_or_stop_it,
            runs::a_late_decision_starts_its_run,
            runs::an_operators_word_starts_a_run,
            runs::a_tick_moves_a_run_on,
            runs::a_tick_that_comes_too_late_writes_nothing,
            runs::a_tick_sent_again_is_recognised,
            runs::an_input_is_applied_once,
            runs::one_late_tick_leaves_the_others_of_a_batch_alone,
            runs::ticks_of_one_run_in_a_batch_count_as_if_one_by_one,
            runs::history_has_no_gap_whoever_writes_it,
            runs::a_body_of_five_megabytes_is_kept,
            run_changes::an_intent_gets_its_turn_once,
            run_changes::a_withdrawn_intent_that_nobody_has_is_discarded,
            run_changes::a_withdrawn_intent_is_left_to_whom_has_it,
            run_changes::an_intent_that_is_withdrawn_after_its_claim_is_discarded,
            run_changes::a_dead_intent_is_redriven_with_new_budgets,
            run_changes::a_dead_intent_is_withdrawn_and_keeps_its_counts,
            run_changes::a_redrive_without_bytes_is_told_to_the_run_again,
            run_changes::a_change_is_told_until_it_was_seen,
            run_changes::a_tick_takes_one_in_and_gives_the_next_its_turn,
            run_reads::ended_timers_and_changes_are_due_and_nothing_else,
            run_reads::each_look_for_what_is_due_goes_on_where_the_last_one_ended,
            run_reads::what_is_due_is_told_of_every_tenant,
            run_reads::a_run_is_loaded_with_what_a_tick_looks_at,
            run_reads::the_answer_of_an_accepted_request_is_told,
            run_reads::runs_are_found_by_each_condition,
            run_reads::a_search_of_runs_is_paged_without_gaps,
            run_reads::history_is_read_from_any_line_on,
            run_reads::attempts_are_told_newest_first,
            run_retention::a_run_past_its_time_is_deleted_with_all_that_belongs_to_it,
            run_retention::a_purge_never_touches_what_is_not_final,
            run_retention::a_final_run_is_kept_for_its_dead_intents,
            run_retention::bytes_of_what_is_dead_for_long_are_deleted,
            run_retention::remembered_claims_past_their_time_are_deleted,
            run_retention::a_run_that_goes_on_keeps_its_record,
            run_retention::a_run_that_ended_keeps_its_record_for_its_validity,
            run_retention::a_record_whose_run_does_not_hold_it_ends_as_ever,
            run_retention::what_runs_keep_never_hides_what_is_past_its_time,
            remembered::a_claim_with_a_request_id_is_remembered,
            remembered::a_claim_with_a_request_id_sent_again_writes_nothing,
            remembered::of_claims_with_one_request_id_one_is_remembered,
            remembered::a_claim_that_lost_is_not_remembered,
            remembered::a_reclaim_with_a_request_id_is_remembered,
            remembered::a_claim_is_remembered_when_another_has_its_record,
            remembered::a_claim_is_remembered_when_its_record_is_purged,
            remembered::a_claim_past_its_time_is_not_remembered,
            remembered::a_request_id_that_won_two_records_stays_with_the_first,
            outbox_claims::one_of_many_concurrent_claims_of_an_intent_wins,
            outbox_claims::one_of_many_claims_of_an_intent_in_a_batch_wins,
            outbox_claims::a_claim_gets_all_that_is_sent,
            outbox_claims::the_horizon_counts_from_the_first_try_after_a_redrive,
            outbox_claims::a_body_of_five_megabytes_is_sent_whole,
            outbox_claims::a_claim_of_an_intent_sent_again_is_won_again,
            outbox_claims::only_what_is_pending_and_due_is_claimed,
            outbox_claims::a_claim_lost_to_the_end_of_its_lease_counts_a_death,
            outbox_claims::three_deaths_in_a_row_quarantine_an_intent,
            outbox_claims::a_try_that_ended_resets_the_deaths,
            outbox_claims::a_withdrawn_intent_whose_claim_is_over_is_discarded,
            outbox_claims::a_paused_destination_is_not_claimed_and_keeps_its_backlog,
            outbox_claims::lanes_are_told_in_order_where_something_is_due,
            outbox_claims::each_lane_gives_what_was_due_for_longest,
            outbox_claims::a_claim_is_extended_by_its_stamp_alone,
            outbox_claims::an_intent_that_cant_be_read_takes_no_other_with_it,
            outbox_ends::a_delivered_intent_is_completed_and_its_answer_kept,
            outbox_ends::an_intent_to_be_tried_again_is_due_after_its_pause,
            outbox_ends::a_dead_intent_keeps_its_bytes_and_tells_its_run,
            outbox_ends::what_is_given_back_cost_no_try,
            outbox_ends::a_withdrawn_intent_ends_as_discarded_unless_it_was_delivered,
            outbox_ends::a_stale_end_writes_nothing_anywhere,
            outbox_ends::a_success_of_a_stale_claim_is_taken_once,
            outbox_ends::a_success_told_while_the_intent_waits_for_its_next_try_is_taken,
            outbox_ends::a_late_success_and_a_new_claim_at_once_are_both_told_the_truth,
            outbox_ends::results_that_are_told_again_write_nothing,
            outbox_ends::ends_in_a_batch_count_as_if_one_by_one,
            outbox_ends::no_character_of_a_note_can_fail_the_end_of_a_try,
            outbox_operators::an_intent_is_found_by_its_id_alone,
            outbox_operators::intents_are_found_by_each_condition,
            outbox_operators::a_search_of_intents_is_paged_without_gaps,
            outbox_operators::an_intent_is_given_up_where_nobody_works_on_it,
            outbox_operators::an_intent_under_way_or_over_is_not_given_up,
            outbox_operators::pauses_are_told_and_audited_once,
            outbox_operators::the_census_of_the_outbox_counts_what_is_not_over,
            whole::the_first_secret_is_made_once,
            whole::the_stores_clock_does_not_run_backwards,
            whole::a_batch_of_nothing_is_answered_with_nothing,
            whole::a_closed_store_says_so,
            whole::a_caller_that_goes_away_leaves_nothing_half_done,
            model::random_sequences_do_what_the_model_does,
        ]);
    };
    (@ $module:ident, $fixture:path, [$($topic:ident :: $case:ident),* $(,)?]) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let fixture = $fixture().await;
                    $crate::store_conformance::$topic::$case(&fixture).await;
                    fixture.store.close().await;
                }
            )*
        }
    };
}
use conformance;
