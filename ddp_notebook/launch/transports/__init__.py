"""Transports to a host: how its host server is started, reached and ended.

    base             interface of all transports
    local            this machine: a child of the notebook's process, and a socket pair
    ports            ports to listen on for other machines
    ssh              another machine: the host server runs under one ssh; the stream is its standard input and output
    ssh_config       the ssh command, and the host name from its configuration
    remote_python    selects the Python interpreter of a host, and reports missing packages
    reconnecting     a stream that survives broken connections, for the ssh of a kept session
    callback         a host whose outpost, started by `launch.starters`, connects to the notebook
    outpost          the remote end of `callback`
    host_list        parses the hosts of `--hosts`
    folders          local folders that are removed when the notebook ends
    cleanup_process  removes files even if the notebook is killed

A new transport is a file in this folder, with a subclass of `base.Transport` and the entry function of its host server.
All transports carry the same messages: `messages.hosts`.
"""
