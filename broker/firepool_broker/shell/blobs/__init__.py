"""Bytes at rest: content-addressed blobs scoped per caller, and what attempts print.

names     digests and scopes as path segments
spool     bytes on their way in: hashed and counted while they are written aside, then named at once or gone
local     `ports.BlobStore` in a directory
remote    `ports.BlobStore` in S3 (or GCS, Azure) by obstore, with a local directory in front
joblogs   `ports.LogStore` in a directory
"""
