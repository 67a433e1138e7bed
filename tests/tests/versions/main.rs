//! The same stories on every major of PostgreSQL that Tidegate replicates from and to.

mod generated;
mod mirror;
mod rules;
mod standby;

use tidegate_tests::majors as servers;

/// One module for each major, so that a test says which one failed.
macro_rules! on_each_major {
    ($($module:ident = $major:literal),*) => { $(
        mod $module {
            use crate::servers::{on, wait};
            use crate::{mirror, rules};

            #[test]
            fn rows_and_schema_changes_arrive_and_a_killed_host_goes_on() {
                on($major, mirror::follows);
            }

            #[test]
            fn the_check_passes_and_the_trigger_leaves_nothing_when_it_goes() {
                on($major, mirror::installs_and_uninstalls);
            }

            #[test]
            fn what_the_source_lacks_is_named() {
                on($major, |servers| wait(rules::lacks(servers)));
            }

            #[test]
            fn a_row_has_the_same_position_after_a_reconnect() {
                on($major, |servers| wait(rules::positions(servers)));
            }

            #[test]
            fn a_commit_is_in_the_copy_or_at_or_beyond_its_floor_and_never_both() {
                on($major, |servers| wait(rules::visibility(servers)));
            }

            #[test]
            fn every_row_that_an_earlier_snapshot_did_not_show_is_told_by_its_xmin() {
                on($major, |servers| wait(rules::second_look(servers)));
            }

            #[test]
            fn a_snapshot_waits_for_who_writes_and_names_him_and_holds_no_lock_and_no_slot() {
                on($major, |servers| wait(rules::snapshots(servers)));
            }

            #[test]
            fn a_table_that_changed_after_the_snapshot_is_not_copied() {
                on($major, |servers| wait(rules::changes(servers)));
            }

            #[test]
            fn a_table_that_somebody_holds_delays_neither_look_ups_nor_other_commands() {
                on($major, |servers| wait(rules::held(servers)));
            }

            #[test]
            fn no_timeout_of_role_or_database_ends_our_sessions() {
                on($major, |servers| wait(rules::timeouts(servers)));
            }
        }
    )* };
}

on_each_major!(postgres_14 = 14, postgres_15 = 15, postgres_16 = 16, postgres_17 = 17, postgres_18 = 18);

#[test]
fn postgres_18_publishes_stored_generated_columns_where_it_is_told_to() {
    servers::on(18, generated::published);
}

#[test]
fn postgres_18_publishes_a_generated_column_that_is_in_the_column_list() {
    servers::on(18, generated::listed);
}

#[test]
fn postgres_18_may_have_nulls_under_a_not_null_that_was_never_checked() {
    servers::on(18, generated::not_valid);
}

#[test]
fn a_standby_of_15_is_refused_by_name() {
    servers::on(15, standby::is_refused);
}

#[test]
fn a_standby_of_16_is_a_source() {
    servers::on(16, standby::is_a_source);
}

#[test]
fn a_standby_of_18_is_a_source() {
    servers::on(18, standby::is_a_source);
}

#[test]
fn a_promoted_standby_of_17_is_followed() {
    servers::on(17, standby::is_followed);
}

#[test]
fn a_promoted_standby_of_18_is_followed() {
    servers::on(18, standby::is_followed);
}

#[test]
fn a_promoted_standby_of_17_is_followed_by_a_start() {
    servers::on(17, standby::is_followed_after_a_restart);
}

#[test]
fn a_promoted_standby_of_17_that_lacks_changes_is_refused_at_a_start() {
    servers::on(17, standby::is_refused_at_a_start_where_it_lacks_changes);
}

#[test]
fn a_promoted_standby_of_16_has_no_slot_and_is_refused() {
    servers::on(16, standby::needs_the_slot);
}

#[test]
fn a_promoted_standby_of_17_whose_slots_were_not_synchronised_is_refused() {
    servers::on(17, standby::needs_the_slot);
}

#[test]
fn a_promoted_standby_of_17_that_lacks_changes_is_refused() {
    servers::on(17, standby::is_refused_where_it_lacks_changes);
}
