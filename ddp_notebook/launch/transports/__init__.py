"""Transports to a host: how its host server is started, reached and ended.

    base             what a transport must be able to do
    local            this machine: a child of the notebook's process, and a socket pair
    ports            on which ports is listened for other machines
    ssh              another machine: what one ssh runs there, and its standard input and output
    ssh_config       what runs as ssh, and what it knows of a host
    remote_python    which Python a host runs, and what it lacks
    reconnecting     a stream that outlives the connections by which it goes, for the ssh of a kept session
    callback         a machine whose host server something else has started, see `launch.starters`, and which calls in
    outpost          its other end
    host_list        what `--hosts` names
    folders          folders of this machine that are removed when the notebook ends
    cleanup_process  what is removed though the notebook is killed

A new transport is a file here: a subclass of `base.Transport`, and the function in which its host server begins. All
transports carry the same messages: `messages.hosts`.
"""
