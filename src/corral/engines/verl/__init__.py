"""The door to verl: policy losses, an engine whose head keeps a support, trainers that hand it on."""
