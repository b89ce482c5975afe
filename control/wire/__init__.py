"""The wire: streams between the processes of a job. The only place that knows gRPC and protobuf."""
