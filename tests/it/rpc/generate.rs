//! Generation over the wire.

use std::time::Duration;

use cotenant::rpc::{
    Limits,
    v1::{self, generate_request::Input, generate_response::Message},
};
use tonic::{Code, Streaming};

use super::daemon::{Daemon, PATIENCE, Settings, reason};

fn prompt(text: &str) -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(Input::Prompt(text.into())),
        ..v1::GenerateRequest::default()
    }
}

async fn next(stream: &mut Streaming<v1::GenerateResponse>) -> Message {
    stream.message().await.unwrap().unwrap().message.unwrap()
}

async fn until_silent(daemon: &Daemon) {
    let mut running = daemon.parrot.running.subscribe();
    tokio::time::timeout(PATIENCE, running.wait_for(|running| *running == 0))
        .await
        .expect("the generation goes on")
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_comes_in_pieces_and_ends_with_what_it_took() {
    let daemon = Daemon::start().await;
    let mut client = daemon.llm().await;
    let conversation = v1::GenerateRequest {
        input: Some(Input::Conversation(v1::Conversation {
            messages: vec![v1::ChatMessage {
                role: v1::ChatRole::User.into(),
                content: "turn on the light".into(),
            }],
        })),
        ..v1::GenerateRequest::default()
    };
    let mut stream = client.generate(conversation).await.unwrap().into_inner();
    assert!(
        matches!(next(&mut stream).await, Message::Started(started) if started.prompt_tokens == 4)
    );
    let mut text = String::new();
    let finished = loop {
        match next(&mut stream).await {
            Message::Delta(delta) => text.push_str(&delta.text),
            Message::Finished(finished) => break finished,
            Message::Started(_) => panic!("started twice"),
        }
    };
    assert_eq!(text, "turn on the light");
    assert_eq!(finished.finish_reason(), v1::FinishReason::Stop);
    assert_eq!(finished.usage.unwrap().completion_tokens, 4);
    assert!(stream.message().await.unwrap().is_none());
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_stops_the_generation() {
    let daemon = Daemon::start().await;
    let mut client = daemon.llm().await;
    let mut stream = client
        .generate(prompt("forever"))
        .await
        .unwrap()
        .into_inner();
    next(&mut stream).await;
    assert_eq!(*daemon.parrot.running.borrow(), 1);
    drop(stream);
    until_silent(&daemon).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_is_given_up() {
    let daemon = Daemon::start_with(Settings {
        limits: Limits {
            reader_patience: Duration::from_millis(200),
            ..Limits::default()
        },
        ..Settings::default()
    })
    .await;
    let mut client = daemon.llm().await;
    let mut stream = client
        .generate(prompt("forever"))
        .await
        .unwrap()
        .into_inner();
    next(&mut stream).await;
    until_silent(&daemon).await;
    drop(stream);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clients_deadline_ends_the_stream() {
    let daemon = Daemon::start().await;
    let mut client = daemon.llm().await;
    let mut request = tonic::Request::new(prompt("forever"));
    request.set_timeout(Duration::from_millis(300));
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let status = loop {
        match stream.message().await {
            Ok(message) => assert!(message.is_some()),
            Err(status) => break status,
        }
    };
    assert_eq!(
        reason(&status),
        (Code::DeadlineExceeded, "DEADLINE_PASSED".into())
    );
    until_silent(&daemon).await;
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_beyond_the_context_and_a_bad_request_are_refused_with_their_field() {
    let daemon = Daemon::start().await;
    let mut client = daemon.llm().await;
    let long = client
        .generate(prompt(&"word ".repeat(101)))
        .await
        .unwrap_err();
    assert_eq!(
        reason(&long),
        (Code::InvalidArgument, "CONTEXT_LENGTH_EXCEEDED".into())
    );
    let empty = client
        .generate(v1::GenerateRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        reason(&empty),
        (Code::InvalidArgument, "INVALID_FIELD".into())
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_breaks_off_in_mid_stream_is_the_last_thing_in_it() {
    let daemon = Daemon::start().await;
    let mut client = daemon.llm().await;
    for (text, expected) in [
        ("now reclaim", (Code::Aborted, "KV_RECLAIMED")),
        ("now break", (Code::Internal, "ENGINE_LOST")),
    ] {
        let mut stream = client.generate(prompt(text)).await.unwrap().into_inner();
        let mut said = String::new();
        let status = loop {
            match stream.message().await {
                Ok(message) => {
                    if let Message::Delta(delta) = message.unwrap().message.unwrap() {
                        said.push_str(&delta.text);
                    }
                }
                Err(status) => break status,
            }
        };
        assert_eq!(said, text, "what was said before it stands");
        assert_eq!(reason(&status), (expected.0, expected.1.to_owned()));
        assert!(stream.message().await.unwrap().is_none());
    }
    daemon.end().await;
}
