"""What the gateway's APIs promise: each case is a request over HTTP and its right answer."""
