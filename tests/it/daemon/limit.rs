//! Limits of the daemon's control group: the budget, and the effects of changes.

use std::{fs, path::PathBuf};

use cotenant::{
    probe::{
        ProbeRoot,
        cgroup::{Cgroup, CgroupVersion},
    },
    rpc::v1::EngineState,
    units::Bytes,
};

use super::installation::{Installation, demo_model, said};

/// Control group with a memory limit, removed on drop.
struct Limited {
    folder: PathBuf,
    version: CgroupVersion,
}

impl Limited {
    /// Creates a group beside this process's own, if this user may.
    fn new(mib: u64) -> Result<Self, String> {
        let own = Cgroup::own(&ProbeRoot::default())
            .ok_or("no group of the supervisor with a memory controller")?;
        let folder = own
            .folder()
            .join(format!("cotenant-limit-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|error| {
            format!("no group of the supervisor with a memory controller: {error}")
        })?;
        let group = Self {
            folder,
            version: own.version(),
        };
        if !group.file().exists() {
            return Err("no group of the supervisor with a memory controller below it".to_owned());
        }
        group.limit(mib);
        Ok(group)
    }

    fn file(&self) -> PathBuf {
        self.folder.join(match self.version {
            CgroupVersion::V1 => "memory.limit_in_bytes",
            CgroupVersion::V2 => "memory.max",
        })
    }

    fn limit(&self, mib: u64) {
        fs::write(self.file(), Bytes::from_mib(mib).get().to_string()).unwrap();
    }

    fn procs(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    fn name(&self) -> String {
        self.folder
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned()
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

const BUDGET: &str =
    "budget: {dwell: 300ms, sample_max: 100ms, hysteresis: 4MiB}\nshedding: {reclaim_min: 8MiB}\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_of_a_control_group_is_the_budget_and_is_followed_while_it_changes() {
    let group = match Limited::new(900) {
        Ok(group) => group,
        Err(reason) => {
            println!("left out: {reason}");
            return;
        }
    };
    let mut installation = Installation::new(&(BUDGET.to_owned() + &demo_model(4096)));
    installation.group = Some(group.procs());
    let check = installation.run(&["check", installation.config().to_str().unwrap()]);
    assert!(check.status.success(), "{}", said(&check));
    let printed = said(&check);
    assert!(
        printed.contains("limited to 900 MiB by the control group `"),
        "{printed}"
    );

    let daemon = installation.start().await;
    let status = daemon.until("the LLM is ready", |status| {
        status
            .engine
            .as_ref()
            .is_some_and(|engine| engine.state() == EngineState::Ready)
    });
    let status = status.await;
    let budget = status.budget.unwrap();
    assert_eq!(budget.total_bytes, 900 << 20);
    assert!(
        status.limited_by.ends_with(&group.name()),
        "{}",
        status.limited_by
    );
    // 8 %, and at least 128 MiB, is reserved.
    assert_eq!(budget.budget_bytes, 772 << 20);

    for mib in [500, 700] {
        group.limit(mib);
        let total = |total: u64| {
            daemon.until("the budget follows the limit", move |status| {
                status
                    .budget
                    .as_ref()
                    .is_some_and(|budget| budget.total_bytes == total)
            })
        };
        let budget = total(mib << 20).await.budget.unwrap();
        assert_eq!(budget.budget_bytes, (mib - 128) << 20);
        let events = installation.events();
        assert!(
            events.contains(&format!("{mib} MiB that the control group `")),
            "{events}"
        );
    }
    let shown = installation.tell(&["status"]);
    let words: Vec<&str> = shown.split_whitespace().collect();
    assert!(
        words
            .join(" ")
            .contains("limited to 700 MiB by the control group `"),
        "{shown}"
    );
    daemon.end().await;
    installation.replay();
}

#[test]
fn a_total_above_the_limit_is_refused_with_the_group_by_check_and_serve() {
    let group = match Limited::new(400) {
        Ok(group) => group,
        Err(reason) => {
            println!("left out: {reason}");
            return;
        }
    };
    let mut installation = Installation::new("budget: {total: 600MiB, reserve: 64MiB}\n");
    installation.group = Some(group.procs());
    let check = installation.run(&["check", installation.config().to_str().unwrap()]);
    assert_eq!(check.status.code(), Some(78), "{}", said(&check));
    let (status, log) = installation.refuses_to_start();
    assert_eq!(status.code(), Some(78));
    for said in [said(&check), log] {
        assert!(
            said.contains("is above the 400 MiB that the control group `"),
            "{said}"
        );
        assert!(said.contains(&group.name()), "{said}");
    }
}
