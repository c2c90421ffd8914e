"""How bytes cross between the processes of a host. Knows nothing of batches, policies or models."""
