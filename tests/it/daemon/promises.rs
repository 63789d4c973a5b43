//! Figures that are promised of the program as it ships.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use super::house::{House, PROGRAM, budget};

/// What a daemon without a model may hold resident, in KiB.
const RSS_MAX_KIB: u64 = 12 * 1024;

fn rss_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// What a daemon of `program` holds once its doors are open, and after it has served them for a while, in KiB.
async fn resident(program: &str) -> (u64, u64) {
    let mut house = House::new(&budget(64));
    program.clone_into(&mut house.program);
    let daemon = house.start().await;
    house.tell(&["status"]);
    // It lets go of what the start needed about four seconds after its listeners have opened.
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut idle = rss_kib(daemon.pid());
    while idle > RSS_MAX_KIB && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
        idle = idle.min(rss_kib(daemon.pid()));
    }
    for _ in 0..20 {
        house.tell(&["status"]);
        assert_eq!(crate::http::client::get(daemon.http, "/metrics").await.status, 200);
        assert_eq!(daemon.ask("hello").await.status, 404);
    }
    let served = rss_kib(daemon.pid());
    daemon.end().await;
    (idle, served)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_without_a_model_is_small() {
    let (idle, served) = resident(PROGRAM).await;
    println!("this build: {idle} KiB resident, {served} KiB after 60 requests");
    let Some(release) = std::env::var_os("COTENANT_RELEASE_BIN") else {
        println!("left out: COTENANT_RELEASE_BIN is not set; `tests/run` sets it to the release build");
        return;
    };
    let release = release.to_str().unwrap();
    let version = Command::new(release).arg("--version").output().unwrap();
    assert!(version.status.success(), "`{release}` does not run");
    let (idle, served) = resident(release).await;
    println!("release build: {idle} KiB resident, {served} KiB after 60 requests");
    assert!(idle <= RSS_MAX_KIB, "{idle} KiB resident, {RSS_MAX_KIB} KiB are promised");
}
