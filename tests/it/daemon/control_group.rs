//! Leases that a control group holds.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use cotenant::{
    probe::{ProbeRoot, cgroup::Hierarchy},
    rpc::v1::{
        CreateLeaseRequest, GetStatusResponse, Lease, LeaseClass, LeaseState,
        lease_service_client::LeaseServiceClient,
    },
};
use nix::sys::signal::{Signal, kill};
use tonic::{Code, Status};

use super::installation::{Installation, PROGRAM, ballast, budget, pid_of, said, workers_ready};
use crate::{rpc::daemon::reason, support::channel_of};

const MIB: u64 = 1 << 20;

/// Control group with an inner group, both removed on drop.
struct Made {
    folder: PathBuf,
    path: String,
}

impl Made {
    /// Creates the groups at the top of the hierarchy, if this user may.
    fn new(name: &str) -> Result<Self, String> {
        let refused = |error: &dyn ToString| {
            let error = error.to_string();
            format!("no group of the supervisor with a memory controller: {error}")
        };
        let hierarchy = Hierarchy::open(&ProbeRoot::default()).ok_or("none is mounted");
        let hierarchy = hierarchy.map_err(|error| refused(&error))?;
        let path = format!("/cotenant-{name}-{}.service", std::process::id());
        let folder = hierarchy.mount_point().join(&path[1..]);
        fs::create_dir_all(folder.join("inner")).map_err(|error| refused(&error))?;
        Ok(Self { folder, path })
    }

    fn inner(&self) -> PathBuf {
        self.folder.join("inner")
    }

    fn remove(&self) {
        fs::remove_dir(self.inner()).unwrap();
        fs::remove_dir(&self.folder).unwrap();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let _gone = (fs::remove_dir(self.inner()), fs::remove_dir(&self.folder));
    }
}

/// Replaces the program by a script that first starts two processes beside the daemon, in its session and not as its
/// children: one in the inner group, and one that belongs to no group of ours.
fn with_neighbours(installation: &mut Installation, made: &Made) {
    let script = installation.path("serve.sh");
    let text = format!(
        "#!/bin/sh
folder=$(dirname \"$0\")
start() {{ ( \"{PROGRAM}\" worker ballast \"$1\" </dev/null >/dev/null 2>&1 & echo $! >\"$folder/$2\" ) }}
if [ \"$1\" = serve ] && [ ! -e \"$folder/member\" ]; then
    start 96MiB member
    start 160MiB unmanaged
    cat \"$folder/member\" >{}/cgroup.procs
fi
exec \"{PROGRAM}\" \"$@\"
",
        made.inner().display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    installation.program = script.display().to_string();
}

fn unaccounted(status: &GetStatusResponse) -> u64 {
    status.budget.as_ref().unwrap().unaccounted_bytes / MIB
}

fn of_camera(status: &GetStatusResponse) -> Option<&Lease> {
    let mut leases = status.leases.iter();
    leases.find(|lease| lease.tenant == "camera" && lease.state() != LeaseState::Gone)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_control_group_is_measured_once_beyond_a_restart_until_it_is_removed() {
    let made = match Made::new("held") {
        Ok(made) => made,
        Err(reason) => return println!("left out: {reason}"),
    };
    let mut installation = Installation::new(&budget(600));
    with_neighbours(&mut installation, &made);
    let daemon = installation.start().await;
    let are_seen = |status: &GetStatusResponse| unaccounted(status) >= 200;
    daemon
        .until("both neighbours are unaccounted", are_seen)
        .await;

    let hold = ["hold", "camera", "--cgroup", &made.path, "--min", "120MiB"];
    let name = installation.tell(&hold).trim().to_owned();
    assert!(name.starts_with("camera#"), "{name}");
    let is_measured = |status: &GetStatusResponse| {
        let used = of_camera(status).and_then(|lease| lease.used_bytes);
        used.is_some_and(|used| (96..120).contains(&(used / MIB)))
    };
    // Both have 256 MiB, and the lease 120 of them: what is left is the other neighbour's. If the group counted twice, it
    // would be 200 and more, and nothing if the other one counted for the lease.
    let counts_once = |status: &GetStatusResponse| {
        is_measured(status) && (60..170).contains(&unaccounted(status))
    };
    let status = daemon
        .until("it counts for the lease alone", counts_once)
        .await;
    let lease = of_camera(&status).unwrap();
    assert_eq!((&lease.cgroup, &lease.expire_time), (&made.path, &None));
    // The same command is answered with the same lease, and its unit is found by name.
    assert_eq!(installation.tell(&hold).trim(), name);
    let unit = &made.path[1..];
    let again = installation.json(&["hold", "camera", "--unit", unit, "--min", "120MiB"]);
    assert_eq!(again["name"], name.as_str());
    for inside in [made.path.clone(), format!("{}/inner", made.path)] {
        let refused = installation.run(&["hold", "x", "--cgroup", &inside, "--min", "1MiB"]);
        let text = said(&refused);
        assert_eq!(refused.status.code(), Some(4), "{text}");
        let expected = format!("lease {name} counts the processes of `{}`", made.path);
        assert!(text.contains(&expected), "{text}");
    }

    daemon.kill();
    let daemon = installation.start().await;
    let status = daemon.until("it counts as before", is_measured).await;
    assert_eq!(of_camera(&status).unwrap().name, name);

    let member = fs::read_to_string(installation.path("member")).unwrap();
    kill(pid_of(member.trim().parse().unwrap()), Signal::SIGKILL).unwrap();
    let is_empty = |status: &GetStatusResponse| {
        of_camera(status).is_some_and(|lease| lease.used_bytes == Some(0))
    };
    daemon
        .until("the empty group holds its lease", is_empty)
        .await;
    made.remove();
    let is_over = |status: &GetStatusResponse| status.leases.is_empty();
    daemon.until("the lease ends with its group", is_over).await;
    assert!(
        installation.events().contains("is gone"),
        "{}",
        installation.events()
    );
    // A lease of a group is released like any other.
    let other = Made::new("released").unwrap();
    let hold = ["hold", "camera", "--cgroup", &other.path, "--min", "8MiB"];
    let name = installation.tell(&hold).trim().to_owned();
    installation.tell(&["leases", "release", &name]);
    daemon.until("it is released", is_over).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_is_none_or_ours_is_refused_and_so_is_another_socket() {
    let made = match Made::new("refused") {
        Ok(made) => made,
        Err(reason) => return println!("left out: {reason}"),
    };
    let mut installation = Installation::new(&format!("{}workers:\n{}", budget(64), ballast()));
    installation.group = Some(made.inner().join("cgroup.procs"));
    let daemon = installation.start().await;
    daemon.until("its worker runs", workers_ready).await;
    let asked = |cgroup: &str| CreateLeaseRequest {
        request_id: "one".to_owned(),
        tenant: "camera".to_owned(),
        lease_class: LeaseClass::Interactive.into(),
        min_bytes: MIB,
        cgroup: cgroup.to_owned(),
        ..CreateLeaseRequest::default()
    };
    let refusal = async |cgroup: &str| -> Status {
        let answer = daemon.leases().create_lease(asked(cgroup)).await;
        answer.map(|lease| format!("{lease:?}")).unwrap_err()
    };
    for bad in [
        "/",
        "system.slice",
        "/a/../b",
        "/a//b",
        "/a/",
        "/./a",
        "/a\n",
    ] {
        let status = refusal(bad).await;
        assert_eq!(
            reason(&status),
            (Code::InvalidArgument, "INVALID_FIELD".to_owned()),
            "{bad}"
        );
    }
    let status = refusal("/no-such.slice/camera.service").await;
    assert_eq!(
        reason(&status),
        (Code::NotFound, "UNKNOWN_CGROUP".to_owned())
    );
    let inner = format!("{}/inner", made.path);
    for ours in [&made.path, &inner] {
        let status = refusal(ours).await;
        assert_eq!(
            reason(&status),
            (Code::FailedPrecondition, "CGROUP_HELD".to_owned())
        );
        assert!(
            status.message().contains("the supervisor, process"),
            "{status}"
        );
    }
    // In version 1 the worker has a group inside the supervisor's.
    let hierarchy = Hierarchy::open(&ProbeRoot::default()).unwrap();
    let worker = daemon.status().await.workers[0].pid.unwrap();
    let group = hierarchy.group_of(&ProbeRoot::default(), worker).unwrap();
    if group != inner {
        let status = refusal(&group).await;
        assert!(status.message().contains("worker `ballast`"), "{status}");
    }
    let name = asked(&made.path);
    let abstract_name = installation.abstract_name();
    let own = nix::unistd::getuid().as_raw();
    if let Some(channel) = channel_of(&abstract_name, own).await {
        let status = LeaseServiceClient::new(channel)
            .create_lease(name)
            .await
            .unwrap_err();
        assert_eq!(
            reason(&status),
            (Code::PermissionDenied, "PATH_SOCKET_NEEDED".to_owned())
        );
    }
    let refused = installation.run(&["hold", "x", "--unit", "no-such-unit", "--min", "1MiB"]);
    assert!(
        said(&refused).contains("unit `no-such-unit`"),
        "{}",
        said(&refused)
    );
    let both = ["hold", "x", "--cgroup", "/a", "--min", "1MiB", "--", "true"];
    assert_eq!(installation.run(&both).status.code(), Some(2));
    assert!(
        daemon
            .status()
            .await
            .leases
            .iter()
            .all(|lease| lease.cgroup.is_empty())
    );
    daemon.end().await;
}
