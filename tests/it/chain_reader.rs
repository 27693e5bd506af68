//! The one chain-reader suite: what `Chain::read` must show, on every chain that can be had in a test.
//!
//! A case is a generic function over [`backend::TestChain`]. A new backend implements that trait and adds
//! one `suite!` line. Cases that only a real EVM can stage stand in `on_anvil`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod absence;
mod agreement;
pub(crate) mod backend;
mod cases;
mod error_rate;
mod every_fault;
mod faults;
mod health;
mod hostile;
mod likeness;
mod many_logs;
pub(crate) mod on_anvil;
pub(crate) mod on_sim;
mod permits;
mod proxy;

macro_rules! tests {
    ($module:ident, $chain:ty: $($case:ident)+) => {
        $(
            #[tokio::test]
            async fn $case() {
                crate::chain_reader::$module::$case::<$chain>().await;
            }
        )+
    };
}

macro_rules! suite {
    ($backend:ident, $chain:ty) => {
        mod $backend {
            tests! { cases, $chain:
                an_unused_authorization_reads_unused_and_is_pending
                a_landed_transfer_reads_exactly_as_it_stands_on_chain
                a_canceled_authorization_reads_canceled
                a_transfer_to_somebody_else_is_used_elsewhere
                a_short_amount_is_used_elsewhere
                a_reverted_transaction_leaves_the_authorization_unused
                an_authorization_past_its_window_expires_only_when_finalized
                four_in_one_transaction_have_their_own_log_indices
                two_payments_with_one_authorization_see_the_same_transfer
                a_reorg_removes_a_transfer
                a_reorg_moves_a_transfer
                a_settlement_becomes_final
                without_multicall3_the_answers_are_the_same
                no_code_at_one_token_does_not_touch_its_neighbours
                another_chain_id_is_the_wrong_chain
                an_endpoint_that_is_down_is_passed_over
                every_endpoint_is_asked_when_breadth_is_all
                a_head_that_stands_still_gives_no_negative_but_still_a_transfer
                an_old_payment_and_a_new_one_are_both_found
                a_thousand_unused_payments_take_few_requests
                a_hundred_landed_payments_take_few_requests
            }
            tests! { agreement, $chain:
                all_are_read_at_the_lowest_head_that_is_near_the_others
                an_endpoint_too_far_behind_is_lagging_and_drags_nobody
                what_a_lagging_endpoint_shows_used_is_evidence
                i2_a_head_of_the_future_makes_nobody_lag_and_shows_nothing_unused
                i2_an_old_number_of_a_new_time_hides_no_transfer
                what_is_final_above_the_common_block_makes_that_final
                another_hash_at_the_common_block_is_disagreement
                one_that_denies_a_cancellation_is_named_and_ends_nothing
            }
            tests! { permits, $chain:
                an_unused_permit_is_pending_and_a_landed_one_reads_as_it_stands_on_chain
                upto_settles_for_what_a_trusted_facilitator_moved
                i6_an_amount_that_the_payer_or_a_batch_chose_pays_only_if_it_is_all
                several_permits_through_multicall3_have_their_own_transfers
                a_permit_settled_in_an_unseen_call_proves_nothing
                an_invalidated_nonce_is_canceled_and_a_used_one_stays_used
                a_nonce_used_for_another_payment_is_used_elsewhere
                other_transfers_of_the_payer_are_told_from_the_payments_own
                a_permit_expires_only_after_its_deadline_and_finalized
                a_mixed_batch_is_one_state_read_and_words_are_shared
                a_hundred_landed_permits_take_few_requests
                a_reorg_removes_and_moves_a_permits_transfer
                a_call_of_an_unknown_proxy_proves_nothing_and_no_permit2_is_no_code
            }
            tests! { health, $chain:
                a_sick_endpoint_gives_no_evidence_until_it_answers_rightly_again
                a_settled_payment_that_all_endpoints_show_becomes_a_known_one
                what_one_endpoint_alone_shows_is_never_learnt
                what_two_endpoints_show_is_asked_of_one_that_denies_it_from_the_start
                i2_a_sick_endpoint_stays_sick_while_probes_fail
                a_learnt_one_without_its_log_forbids_nothing_and_is_not_asked_for_ever
                a_random_nonce_is_asked_about_from_the_first_read_on
                an_endpoint_that_is_down_or_serves_another_chain_is_said_to_be_so
                what_was_seen_used_does_not_become_unused
                an_older_block_says_nothing_about_what_was_seen_used
            }
            tests! { absence, $chain:
                an_empty_list_is_an_error_where_a_block_by_itself_has_a_log
                bloom_filters_that_match_everything_stall_nothing
                transfers_of_nothing_are_not_scanned
                a_second_look_that_fails_makes_an_empty_list_an_error
                each_kind_of_log_search_learns_a_width_of_its_own
            }
            tests! { many_logs, $chain:
                i11_a_payer_with_too_many_logs_takes_nothing_from_the_others
                i11_a_payer_whose_logs_are_refused_takes_nothing_from_the_others
                transfers_of_nothing_in_a_payer_s_name_hide_nothing
            }
            tests! { error_rate, $chain:
                one_that_keeps_failing_gives_no_evidence_until_few_requests_fail
                what_paces_or_comes_at_once_makes_nobody_sick
            }
            tests! { faults, $chain:
                a_small_range_limit_is_learnt_and_everything_is_found
                a_range_limit_of_nothing_is_range_refused
                empty_log_answers_send_us_to_the_next_endpoint
                no_logs_under_a_bloom_filter_that_has_one_is_an_error
                a_node_without_the_last_block_of_the_range_shows_no_absence
                logs_that_do_not_fit_the_question_are_refused
                a_transfer_that_does_not_follow_directly_is_no_transfer
                a_block_that_is_no_longer_canonical_gives_no_evidence
                a_head_that_is_no_longer_canonical_gives_no_evidence
                a_finalized_block_above_the_head_is_a_bad_answer
                a_finalized_block_above_the_safe_one_is_a_bad_answer
                a_time_that_was_told_wrong_is_not_remembered_for_good
                states_from_another_block_are_a_bad_answer
                states_are_read_at_the_hash_of_the_head_or_not_at_all
                a_slow_down_is_rate_limited
                an_endpoint_that_refuses_is_left_alone_for_a_while
                an_endpoint_that_hangs_takes_nothing_from_the_others
                i11_a_log_search_that_hangs_takes_nothing_from_what_was_answered
                a_token_that_burns_all_gas_does_not_touch_its_neighbours
                one_that_calls_everything_too_much_is_not_asked_in_halves_for_ever
                what_an_endpoint_says_is_never_kept_whole
                a_failed_log_read_fails_only_the_used_payments
                i2_who_refuses_logs_still_contradicts_who_says_unused
            }
            tests! { every_fault, $chain:
                no_fault_makes_a_reader_say_what_is_not_so
            }
        }
    };
}

suite!(anvil, super::on_anvil::OnAnvil);
suite!(sim, super::on_sim::OnSim);
