//! Socket activation: sockets passed by a service manager.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixListener,
};

use nix::sys::signal::Signal;

use super::{
    installation::{Installation, budget},
    wyoming_client::{Client, LISTENER, wyoming_socket},
};
use crate::{http::client::get, support::PATIENCE};

/// Sends a request without waiting for its response.
fn asks(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    stream
}

fn answer(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_made_before_the_daemon_runs_is_served_and_a_restart_refuses_none() {
    let mut installation = Installation::new("");
    let http = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = http.local_addr().unwrap();
    installation.configure_with_http(&format!("{}{LISTENER}", budget(64)), &address.to_string());
    let (grpc, wyoming) = (installation.socket(), wyoming_socket(&installation));
    installation.passed = vec![
        ("http", http.into()),
        ("grpc", UnixListener::bind(&grpc).unwrap().into()),
        ("wyoming", UnixListener::bind(&wyoming).unwrap().into()),
    ];
    let early = asks(address);
    let daemon = installation.start().await;
    assert_eq!(answer(early), "HTTP/1.1 200 OK");
    assert_eq!(daemon.http, address);
    assert!(
        !daemon.status().await.boot_id.is_empty(),
        "gRPC is served on its socket"
    );

    // After a kill and after a clean end, the next daemon serves connections made in between.
    daemon.kill();
    let meanwhile = asks(address);
    let daemon = installation.start().await;
    assert_eq!(answer(meanwhile), "HTTP/1.1 200 OK");
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.ends().success());
    assert!(
        grpc.exists() && wyoming.exists(),
        "the files belong to the one who listens"
    );
    let meanwhile = asks(address);
    let daemon = installation.start().await;
    assert_eq!(answer(meanwhile), "HTTP/1.1 200 OK");
    let _connected = Client::connect(&installation).await;
    assert!(
        !installation.log().contains("systemd's socket"),
        "all agree with the configuration: {}",
        installation.log()
    );
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passed_sockets_that_the_configuration_does_not_name_are_reported() {
    let mut installation = Installation::new(&budget(64));
    let (other, unknown) = (
        TcpListener::bind("127.0.0.1:0").unwrap(),
        TcpListener::bind("127.0.0.1:0").unwrap(),
    );
    let (other_address, unknown_address) =
        (other.local_addr().unwrap(), unknown.local_addr().unwrap());
    // The configuration requests HTTP on a separate socket.
    let own = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    installation.configure_with_http(&budget(64), &own.to_string());
    installation.passed = vec![("http", other.into()), ("smtp", unknown.into())];
    let daemon = installation.start().await;
    for address in [own, other_address] {
        assert_eq!(get(address, "/v1/models").await.status, 200, "{address}");
    }
    let named = format!(
        "systemd's socket `http` listens on {other_address}, which `http.listen` does not name"
    );
    installation.logged(&named).await;
    let refused =
        format!("systemd's socket `smtp` on {unknown_address} is not served: no API has this name");
    installation.logged(&refused).await;
    daemon.end().await;
}
