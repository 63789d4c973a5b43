//! Unmanaged process that takes real memory in the same budget, and ends again.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use cotenant::speech::client::{ClientTimeouts, Endpoint, WyomingClient};

use super::{
    clients::client,
    installation::{Installation, asr, said, tts, whole},
};
use crate::support::speech_is_installed;

/// Budget in which the neighbour fits only if the engine sheds: all but the reserve is in use.
const BUDGET: &str =
    "budget: {total: 380MiB, reserve: 64MiB, scope: session, hysteresis: 4MiB, dwell: 300ms, \
                      sample_max: 100ms, fill_rate_max: 400MiB}
shedding: {reclaim_min: 8MiB}
";

/// Memory of the neighbour, in MiB: most of the engine's memory above its floor.
const NEIGHBOUR: u32 = 160;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_client_misses_anything_while_a_neighbour_takes_memory_again_and_again() {
    if !speech_is_installed() {
        return;
    }
    let model = super::installation::demo_model(65_536).replace("kv_floor: 128", "kv_floor: 1024");
    let mut installation = Installation::new(&format!(
        "{BUDGET}{model}wyoming: {{listen: [\"unix://{{FOLDER}}/wyoming.sock\"]}}\nworkers:\n{}{}",
        tts(),
        asr()
    ));
    installation.prefer_release();
    installation.neighbour = Some(NEIGHBOUR);
    let daemon = installation.start().await;
    let before = daemon.whole().await;
    fs::write(installation.path("come"), "").unwrap();
    daemon
        .until("the engine has given way", |status| {
            status
                .engine
                .as_ref()
                .is_some_and(|engine| engine.sheds > 0)
        })
        .await;

    let url = format!("http://{}", daemon.http);
    let listener = format!("unix://{}", installation.path("wyoming.sock").display());
    let words = |words: &[&str]| {
        words
            .iter()
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>()
    };
    // Including its Realtime part.
    let openai = words(&[
        &format!("{url}/v1"),
        "--brief",
        "--say",
        "turn on the kitchen light",
    ]);
    let metrics = words(&[&url]);
    let ollama = words(&[&url, "--rounds", "2"]);
    let anthropic = words(&[&url]);
    let wyoming = words(&[&listener]);
    let grpc = words(&[
        &installation.socket().display().to_string(),
        &installation.abstract_name(),
        "--work",
        "3",
    ]);
    let over = AtomicBool::new(false);
    let describe = async {
        let client = WyomingClient::new(
            listener.parse::<Endpoint>().unwrap(),
            ClientTimeouts::default(),
        );
        let mut slowest = Duration::ZERO;
        while !over.load(Ordering::Relaxed) {
            let began = Instant::now();
            // Its own limit is the one second allowed by Home Assistant.
            client.describe().await.unwrap();
            slowest = slowest.max(began.elapsed());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        slowest
    };
    let clients = async {
        let outputs = tokio::join!(
            client("openai_client.py", &openai),
            client("ollama_client.py", &ollama),
            client("anthropic_client.py", &anthropic),
            client("wyoming_front.py", &wyoming),
            client("grpc_client.py", &grpc),
            client("metrics_client.py", &metrics),
        );
        over.store(true, Ordering::Relaxed);
        outputs
    };
    let (outputs, slowest) = tokio::join!(clients, describe);
    let (Some(openai), Some(ollama), Some(anthropic), Some(wyoming), Some(grpc), Some(metrics)) =
        outputs
    else {
        return;
    };
    for (name, output) in [
        ("openai", openai),
        ("anthropic", anthropic),
        ("ollama", ollama),
        ("wyoming", wyoming),
        ("grpcio", grpc),
        ("prometheus_client", metrics),
    ] {
        assert!(
            output.status.success(),
            "{name}: {}\n{}",
            said(&output),
            installation.events()
        );
    }
    let after = daemon.status().await;
    let sheds = after.engine.as_ref().unwrap().sheds - before.engine.as_ref().unwrap().sheds;
    println!("{sheds} sheds for the neighbour; describe took {slowest:?} at most");
    assert!(sheds >= 2, "{sheds} sheds only");
    for worker in &after.workers {
        assert_eq!(worker.failures, 0, "{worker:?}");
    }
    for route in ["/v1/chat/completions", "/api/chat", "wyoming/talk"] {
        let of = |code: &str| {
            format!("cotenant_request_seconds_count{{route=\"{route}\",code=\"{code}\"}}")
        };
        assert_eq!(daemon.metric(&of("500")).await, None, "{route}");
        println!(
            "{route}: {:?} refused for now, and tried again by their client",
            daemon.metric(&of("503")).await
        );
    }
    let aloud = daemon
        .metric("cotenant_time_to_first_audio_seconds_count")
        .await;
    assert!(aloud.is_some_and(|count| count >= 4.0), "{aloud:?}");
    // It ends, and everything is restored.
    fs::remove_file(installation.path("come")).unwrap();
    fs::write(installation.path("over"), "").unwrap();
    daemon.until("grown back", whole).await;
    daemon.end().await;
}
