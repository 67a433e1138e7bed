use super::*;

const TOTAL: usize = 512 * MIB;

fn waits(share: &Share, bytes: usize) -> tokio::task::JoinHandle<Option<Taken>> {
    let share = share.clone();
    tokio::spawn(async move { share.take(bytes).await })
}

/// Lets everybody run who can.
async fn settle() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn who_finds_no_room_waits_until_something_is_given_back_and_in_order_of_coming() {
    let share = Share::fixed(10 * MIB);
    let first = share.take(8 * MIB).await.unwrap();
    let (large, small) = (waits(&share, 9 * MIB), waits(&share, MIB));
    settle().await;
    assert!(!large.is_finished());
    assert!(!small.is_finished(), "it came later, although there is room for it");
    assert!(share.try_take(1).is_none(), "nor does anybody else overtake");
    drop(first);
    let large = large.await.unwrap().unwrap();
    let small = small.await.unwrap().unwrap();
    drop((large, small));
    assert!(share.fits(10 * MIB));
}

#[tokio::test]
async fn what_is_larger_than_the_share_passes_alone() {
    let share = Share::fixed(MIB);
    let small = share.take(1).await.unwrap();
    let large = waits(&share, 100 * MIB);
    settle().await;
    assert!(!large.is_finished());
    drop(small);
    let large = large.await.unwrap().unwrap();
    assert!(!share.fits(1));
    drop(large);
    assert!(share.fits(1));
}

#[tokio::test]
async fn who_gives_up_waiting_keeps_nobody_else_waiting() {
    let share = Share::fixed(MIB);
    let held = share.take(MIB).await.unwrap();
    let (gone, next) = (waits(&share, MIB), waits(&share, MIB));
    settle().await;
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    drop(held);
    assert!(next.await.unwrap().is_some());
}

#[tokio::test]
async fn whoever_holds_something_is_told_that_somebody_waits_for_it() {
    let share = Share::fixed(MIB);
    let held = share.take(MIB).await.unwrap();
    let told = tokio::spawn({
        let share = share.clone();
        async move { share.wanted().await }
    });
    settle().await;
    assert!(!told.is_finished(), "nobody does yet");
    let waiting = waits(&share, 1);
    told.await.unwrap();
    drop(held);
    drop(waiting.await.unwrap().unwrap());
    let told = tokio::spawn(async move { share.wanted().await });
    settle().await;
    assert!(!told.is_finished(), "nobody does any more");
}

#[tokio::test]
async fn a_share_that_is_closed_sends_away_whoever_waits_and_whoever_comes() {
    let share = Share::fixed(MIB);
    let _held = share.take(MIB).await.unwrap();
    let waiting = waits(&share, 1);
    settle().await;
    share.close();
    assert!(waiting.await.unwrap().is_none());
    assert!(share.take(1).await.is_none());
}

#[tokio::test]
async fn one_destination_cannot_take_what_is_anothers() {
    let budget = Budget::of(TOTAL, 2);
    let (one, other) = (budget.live(), budget.live());
    let mut held = Vec::new();
    while one.fits(MIB) {
        held.push(one.take_now(MIB));
    }
    assert!(other.fits(other.bytes()));
    assert_eq!(budget.used(), held.len() * MIB);
    assert!(budget.copy().fits(MIB));
}

#[test]
fn all_shares_together_stay_within_what_rows_on_their_way_may_have() {
    for total in [64, 100, 512, 4096] {
        for destinations in [1, 2, 3, 10] {
            let budget = Budget::of(total * MIB, destinations);
            let shares: Vec<Share> = (0..destinations).flat_map(|_| [budget.live(), budget.copy()]).collect();
            let together: usize = shares.iter().map(Share::bytes).sum();
            assert!(together <= budget.in_flight(), "{together} of {total} MiB for {destinations}");
            assert!(shares.iter().all(|share| share.bytes() > 0));
        }
    }
}

#[tokio::test]
async fn what_the_instances_have_makes_the_shares_smaller_until_they_are_gone() {
    let budget = Budget::of(TOTAL, 4);
    let share = budget.live();
    let before = share.bytes();
    let mut guest = budget.guest();
    guest.grown_to(300 * MIB);
    guest.grown_to(200 * MIB);
    assert_eq!(budget.used(), 300 * MIB);
    assert!(share.bytes() < before);
    guest.grown_to(10 * TOTAL);
    assert_eq!(share.bytes(), TOTAL / 4 / 4 / 2, "a quarter stays");
    let held = share.take(share.bytes()).await.unwrap();
    let waiting = waits(&share, MIB);
    settle().await;
    assert!(!waiting.is_finished());
    drop(guest);
    assert!(waiting.await.unwrap().is_some(), "whoever waits is told that there is room");
    drop(held);
    assert_eq!((share.bytes(), budget.used()), (before, 0));
}

#[test]
fn all_copies_of_the_largest_row_fit_into_the_budget() {
    for destinations in [1, 2, 5, 20] {
        let budget = Budget::of(TOTAL, destinations);
        assert!(budget.row_bytes() * COPIES * destinations <= TOTAL - BASE_BYTES);
    }
    assert_eq!(Budget::of(TOTAL, 1).row_bytes(), 56 * MIB);
    assert_eq!(Budget::of(100 << 30, 1).row_bytes(), 1 << 30, "the server sends no longer one");
}

#[test]
fn a_destination_more_than_the_budget_is_enough_for_is_refused() {
    let budget = Budget::new(Some(80 << 20), 1).unwrap_or_else(|error| panic!("{error}"));
    budget.add_destination().unwrap();
    assert_eq!(budget.add_destination().unwrap_err().code(), "config.memory");
    assert_eq!(budget.destinations(), 2);
    assert!(check("it", (64 << 20) - 1, 1).is_err());
    assert!(check("it", 64 << 20, 1).is_ok());
}

#[test]
fn the_default_is_half_of_the_cgroups_limit_and_never_more_than_512_mib() {
    assert_eq!(default_bytes(None), 512 << 20);
    assert_eq!(default_bytes(Some(300 << 20)), 150 << 20);
    // What version 1 says where there is no limit.
    assert_eq!(default_bytes(Some(9_223_372_036_854_771_712)), 512 << 20);
}

/// A file system of cgroups: directories and what their limit says.
fn mounted(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (file, text) in files {
        let path = root.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    root
}

#[test]
fn the_least_limit_on_the_way_to_the_root_counts() {
    let root = mounted(&[("memory.max", "max\n"), ("a/memory.max", "1000\n"), ("a/b/memory.max", "2000\n")]);
    assert_eq!(limit_of("0::/a/b\n", root.path()), Some(1000));
    assert_eq!(limit_of("0::/\n", root.path()), None);
    // A container that sees the path from outside.
    let root = mounted(&[("memory.max", "3000\n")]);
    assert_eq!(limit_of("0::/system.slice/docker-1.scope\n", root.path()), Some(3000));
}

#[test]
fn version_1_keeps_its_limit_with_its_memory_controller() {
    let root = mounted(&[
        ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("memory/a/memory.limit_in_bytes", "5000\n"),
        ("cpu/a/memory.limit_in_bytes", "1\n"),
    ]);
    assert_eq!(limit_of("5:devices:/a\n4:memory:/a\n3:cpu:/a\n0::/\n", root.path()), Some(5000));
    assert_eq!(limit_of("4:cpuset,memory:/elsewhere/a\n", root.path()), Some(9_223_372_036_854_771_712));
    assert_eq!(limit_of("4:freezer:/a\n", root.path()), None);
}
