"""What makes training data: documents in, token shards out."""
