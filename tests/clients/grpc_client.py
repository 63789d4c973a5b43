#!/usr/bin/env python3
"""The grpcio package, unmodified, against a running cotenant.

    grpc_client.py SOCKET ABSTRACT_NAME [--work ROUNDS]

With --work it only does its daily work, so often: a lease, an answer, the state. Nothing is tried twice. Messages come from server reflection, so that no generated code is needed. Every check prints one line; the exit code is
0 when all of them hold. One is a failure that is expected: it tells us when the transport changes.
"""

import os
import queue
import subprocess
import sys
import uuid

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from checks import check, run

MIB = 1 << 20


class Context:
    def __init__(self, socket, abstract):
        self.socket = socket
        self.abstract = abstract
        self.channel = self.open_path()
        self.pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(self.channel))

    def open_path(self, form="unix://{}"):
        # Without the option grpcio sends the path as :authority, which HTTP/2 servers may refuse; see the check below.
        return grpc.insecure_channel(form.format(self.socket), options=[("grpc.default_authority", "localhost")])

    def message(self, name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName("cotenant.v1." + name))

    def call(self, service, method, channel=None, **fields):
        request, response = self.message(method + "Request"), self.message(method + "Response")
        stub = (channel or self.channel).unary_unary(
            f"/cotenant.v1.{service}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return stub(request(**fields), timeout=10)

    def create(self, channel=None, **fields):
        fields = {"request_id": str(uuid.uuid4()), "tenant": "python", "lease_class": 2, "min_bytes": 8 * MIB} | fields
        return self.call("LeaseService", "CreateLease", channel, **fields).lease

    def release(self, lease, channel=None):
        self.call(
            "LeaseService", "ReleaseLease", channel, name=lease.name, boot_id=lease.boot_id, generation=lease.generation
        )


def details(error):
    """The rich details of an error, by type."""
    found = {}
    for packed in rpc_status.from_call(error).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.QuotaFailure, error_details_pb2.RetryInfo,
                     error_details_pb2.BadRequest, error_details_pb2.ResourceInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = kind()
                packed.Unpack(found[kind.DESCRIPTOR.name])
    assert found["ErrorInfo"].domain == "cotenant"
    return found


def refused(code, reason, action):
    try:
        action()
    except grpc.RpcError as error:
        found = details(error)
        assert (error.code(), found["ErrorInfo"].reason) == (code, reason), error
        return found
    raise AssertionError(f"not refused: {reason}")


@check
def health_of_the_whole_and_of_a_part_and_of_nothing(context):
    stub = health_pb2_grpc.HealthStub(context.channel)
    for service in ("", "cotenant.v1.LeaseService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
    try:
        stub.Check(health_pb2.HealthCheckRequest(service="nonsense"), timeout=10)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.NOT_FOUND
    else:
        raise AssertionError("an unknown service has a health")
    listed = stub.List(health_pb2.HealthListRequest(), timeout=10).statuses
    for service in ("", "cotenant.v1.LeaseService"):
        assert listed[service].status == health_pb2.HealthCheckResponse.SERVING, listed
    assert "nonsense" not in listed, listed
    first = next(iter(stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)))
    assert first.status == health_pb2.HealthCheckResponse.SERVING


@check
def reflection_names_the_services(context):
    services = ProtoReflectionDescriptorDatabase(context.channel).get_services()
    for service in ("cotenant.v1.LeaseService", "cotenant.v1.OperatorService", "cotenant.v1.LlmService",
                    "grpc.health.v1.Health"):
        assert service in services, services


@check
def a_lease_is_created_renewed_and_released(context):
    lease = context.create(term={"seconds": 10})
    assert lease.held_bytes == 8 * MIB and lease.owner_uid == os.getuid()
    renewed = context.call(
        "LeaseService", "RenewLease", name=lease.name, boot_id=lease.boot_id, generation=lease.generation
    ).lease
    assert renewed.name == lease.name
    context.release(lease)


@check
def the_same_request_books_once(context):
    fields = {"request_id": str(uuid.uuid4()), "min_bytes": 4 * MIB}
    first, second = context.create(**fields), context.create(**fields)
    assert first.name == second.name
    refused(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED", lambda: context.create(**fields | {"min_bytes": MIB}))
    context.release(first)


@check
def a_lease_is_held_on_a_stream(context):
    lease = context.create(tenant="stream")
    request, response = context.message("HoldLeaseRequest"), context.message("HoldLeaseResponse")
    outgoing = queue.Queue()
    outgoing.put(request(name=lease.name, boot_id=lease.boot_id, generation=lease.generation))
    stream = context.channel.stream_stream(
        "/cotenant.v1.LeaseService/HoldLease",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )(iter(outgoing.get, None), timeout=20)
    answer = next(stream)
    assert answer.WhichOneof("message") == "renewed" and answer.renewed.name == lease.name
    # A reply to a target that was never sent changes nothing, and is reported.
    outgoing.put(request(name=lease.name, boot_id=lease.boot_id, generation=lease.generation, nonce=99,
                         target_bytes=1, state=1))
    answer = next(stream)
    assert answer.receipt.nonce == 99 and answer.receipt.reason == "no_target_in_force", answer
    assert next(stream).WhichOneof("message") == "renewed"
    context.release(lease)
    assert next(stream).WhichOneof("message") == "ended"
    outgoing.put(None)
    assert list(stream) == []


@check
def rich_errors_are_decoded(context):
    found = refused(
        grpc.StatusCode.FAILED_PRECONDITION, "EXCEEDS_BUDGET", lambda: context.create(min_bytes=1 << 40)
    )
    assert found["QuotaFailure"].violations[0].subject == "pools/unified"
    found = refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", lambda: context.create(min_bytes=0))
    assert found["BadRequest"].field_violations[0].field == "min_bytes"

    lease = context.create(tenant="large", min_bytes=700 * MIB)
    found = refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "INSUFFICIENT_MEMORY",
                    lambda: context.create(tenant="larger", min_bytes=900 * MIB))
    violation = found["QuotaFailure"].violations[0]
    assert violation.quota_metric == "unified_memory_bytes" and violation.quota_value > 0
    assert found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0
    assert int(found["ErrorInfo"].metadata["asked_bytes"]) == 900 * MIB
    context.release(lease)
    found = refused(grpc.StatusCode.NOT_FOUND, "UNKNOWN_LEASE", lambda: context.release(lease))
    assert found["ResourceInfo"].resource_type == "cotenant.lease"


@check
def the_clients_deadline_has_its_own_code(context):
    request, response = context.message("WatchEventsRequest"), context.message("WatchEventsResponse")
    stream = context.channel.unary_stream(
        "/cotenant.v1.OperatorService/WatchEvents",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )(request(), timeout=0.5)
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
    else:
        raise AssertionError("the stream ended by itself")


@check
def the_abstract_socket_needs_no_option(context):
    with grpc.insecure_channel(f"unix-abstract:{context.abstract}") as channel:
        lease = context.create(channel, tenant="abstract")
        context.release(lease, channel)


@check
def the_short_form_of_the_path_works_too(context):
    with context.open_path("unix:{}") as channel:
        assert context.call("OperatorService", "GetStatus", channel).budget.budget_bytes > 0


@check
def a_relative_path_needs_no_option(context):
    # grpcio takes the path from the working directory, which must not change during the other checks.
    code = "import sys, grpc; from grpc_health.v1 import health_pb2 as h, health_pb2_grpc as g; " \
           "g.HealthStub(grpc.insecure_channel('unix:' + sys.argv[1])).Check(h.HealthCheckRequest(), timeout=10)"
    folder, name = os.path.split(context.socket)
    subprocess.run([sys.executable, "-c", code, name], cwd=folder, check=True)


@check
def a_path_without_the_option_fails_as_known(context):
    """grpc-core sends the escaped path as :authority, and h2 resets the stream (hyperium/h2 issue 487).

    When this check fails, the transport has learned to take it: then drop the option from here and from the docs.
    """
    for form in ("unix:{}", "unix://{}"):
        with grpc.insecure_channel(form.format(context.socket)) as channel:
            try:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.INTERNAL and "RST_STREAM" in error.details(), error
            else:
                raise AssertionError("it works now")


def work(context, rounds):
    """Daily work: a lease that is worth waiting for, an answer to the end, the state."""
    request, response = context.message("GenerateRequest"), context.message("GenerateResponse")
    generate = context.channel.unary_stream(
        "/cotenant.v1.LlmService/Generate",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    for _ in range(rounds):
        lease = context.create(lease_class=1, max_wait={"seconds": 8})
        asked = request(max_tokens=64)
        asked.conversation.messages.add(role=2, content="turn on the kitchen light")
        text, last = "", None
        for answer in generate(asked, timeout=60):
            last = answer.WhichOneof("message")
            text += answer.delta.text
        assert last == "finished" and "kitchen" in text, (last, text)
        assert context.call("OperatorService", "GetStatus").budget.budget_bytes > 0
        context.release(lease)


def main():
    context = Context(*sys.argv[1:3])
    if sys.argv[3:4] == ["--work"]:
        work(context, int(sys.argv[4]))
        print("ok      daily work")
        return
    sys.exit(run(context))


if __name__ == "__main__":
    main()
