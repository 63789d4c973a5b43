//! Tests of leases that a control group holds.

use proptest::prelude::*;

use super::*;
use crate::lease::LeaseState;

const CAMERA: &str = "/system.slice/camera.service";

/// Returns a request without a term, by process `pid` of user 1000.
fn of_group(tenant: &str, path: &str, (min, max): (u64, u64), pid: u32) -> LeaseRequest {
    LeaseRequest {
        request_id: path.to_owned(),
        term: None,
        cgroup: Some(path.to_owned()),
        ..of_process(tenant, Class::Interactive, (min, max), 1000, pid)
    }
}

#[test]
fn a_control_group_holds_its_lease_without_a_term_and_beyond_the_process_that_asked() {
    let mut rig = Rig::sampled(params());
    rig.ask(of_group("camera", CAMERA, (100, 100), 10));
    let lease = rig.granted();
    assert_eq!(lease.owner.cgroup.as_deref(), Some(CAMERA));
    assert_eq!((lease.owner.owner_pid, lease.expires_at), (None, None));
    rig.tell(Event::HolderLost {
        lease: lease.id,
        pid: Some(10),
    });
    rig.pass(3_600_000);
    assert_eq!(rig.held("camera"), mib(100));
    // A repeated request is the same lease, by any process of the user.
    rig.ask(of_group("camera", CAMERA, (100, 100), 11));
    assert_eq!(rig.granted().id, lease.id);
    rig.renew(&lease);
    assert_eq!(rig.granted().expires_at, None);
    // The next run continues it, for as long as the group exists.
    let book = rig.arbiter.book();
    let mut rig = Rig::new(params());
    let adopted = Vec::new();
    rig.tell(Event::Recovered { book, adopted });
    rig.pass(3_600_000);
    assert_eq!(rig.held("camera"), mib(100));
    assert_eq!(rig.lease("camera").unwrap().expires_at, None);
    rig.lost(&lease);
    assert!(rig.lease("camera").is_none());
    assert_eq!(rig.snapshot().memory.held, mib(0));
}

#[test]
fn a_control_group_with_a_term_ends_by_it_or_when_its_user_releases_it() {
    let mut rig = Rig::sampled(params());
    rig.ask(LeaseRequest {
        term: Some(Duration::from_secs(10)),
        ..of_group("camera", CAMERA, (100, 100), 10)
    });
    let lease = rig.granted();
    rig.pass(10_000);
    assert_eq!(rig.lease("camera").unwrap().state, LeaseState::Gone);
    rig.wait(5).measure("camera", 40);
    let state = rig.snapshot();
    assert_eq!(
        (state.memory.held, state.memory.unaccounted),
        (mib(0), mib(40))
    );
    // Its group may have a lease again, which counts the remaining memory.
    rig.ask(of_group("again", CAMERA, (50, 50), 12));
    let again = rig.granted();
    assert_eq!(again.holder(), lease.holder());
    assert_eq!(rig.snapshot().memory.unaccounted, mib(0));
    rig.release(&again, peer(1001));
    assert!(matches!(rig.denial(), Denial::NotHolder { .. }));
    rig.release(&again, peer(1000));
    rig.wait(5).measure("camera", 0);
    assert_eq!(rig.snapshot().memory.held, mib(0));
}

/// Otherwise the memory of one would count for both.
#[test]
fn a_process_and_two_control_groups_of_one_name_are_three_holders() {
    let mut rig = Rig::sampled(params());
    let mut holder_of = |request| {
        rig.ask(request);
        rig.granted().holder().to_owned()
    };
    let process = of_process("a", Class::Interactive, (10, 10), 1000, 10);
    let holders = [
        process.clone(),
        of_group("a", "/x", (10, 10), 10),
        of_group("a", "/y", (10, 10), 10),
    ];
    let holders = holders.map(&mut holder_of);
    assert_eq!(holders, ["a", "a (cgroup /x)", "a (cgroup /y)"]);
    let unseen = request("a", Class::Interactive, 10, 10, 0);
    assert_eq!(holder_of(unseen), "a (uid 1000)");
    assert_eq!(
        holder_of(LeaseRequest {
            request_id: "2".to_owned(),
            ..process
        }),
        "a"
    );
}

#[test]
fn a_group_around_or_inside_that_of_another_lease_or_request_is_refused_by_name() {
    let mut rig = Rig::sampled(params());
    rig.ask(of_group("camera", CAMERA, (300, 300), 10));
    rig.granted();
    let mut denied = |tenant: &str, path: &str| {
        rig.ask(LeaseRequest {
            wait: ms(9000),
            ..of_group(tenant, path, (200, 200), 10)
        });
        match rig.try_answer() {
            Some(Answer::Denied {
                denial: Denial::CgroupHeld { held, lease, .. },
                ..
            }) => Some((held, lease)),
            Some(other) => panic!("{other:?}"),
            None => None,
        }
    };
    let by_camera = Some((CAMERA.to_owned(), "camera#1".to_owned()));
    for path in [CAMERA, "/system.slice", &format!("{CAMERA}/inner")] {
        assert_eq!(denied("other", path), by_camera, "{path}");
    }
    // It waits for memory, and counts already.
    assert_eq!(denied("waits", "/system.slice/camera"), None);
    let by_waiting = ("/system.slice/camera".to_owned(), "waits#2".to_owned());
    assert_eq!(denied("third", "/system.slice/camera/x"), Some(by_waiting));
}

proptest! {
    #[test]
    fn no_two_groups_with_leases_share_a_process(
        steps in proptest::collection::vec((any::<bool>(), "(/[ab]){1,4}"), 1..40)
    ) {
        let mut rig = Rig::sampled(params());
        let mut held: Vec<LeaseView> = Vec::new();
        for (number, (release, path)) in steps.into_iter().enumerate() {
            if let Some(lease) = held.pop_if(|_| release) {
                rig.release(&lease, peer(1000));
                continue;
            }
            let overlaps = |lease: &LeaseView| {
                let other = format!("{}/", lease.owner.cgroup.as_ref().unwrap());
                let path = format!("{path}/");
                other.starts_with(&path) || path.starts_with(&other)
            };
            let expected = held.iter().any(overlaps);
            rig.ask(of_group(&format!("t{number}"), &path, (1, 1), 10));
            match rig.answer() {
                Answer::Lease { lease } => {
                    prop_assert!(!expected, "{path} beside {held:?}");
                    held.push(lease);
                }
                Answer::Denied { denial: Denial::CgroupHeld { .. }, .. } => prop_assert!(expected),
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }
}
