// Stands in for the libraries that TensorRT's Python bindings are linked to, on a machine without a GPU: builders and runtimes
// cannot be created, but the bindings' own classes and names can be inspected.
extern "C" {
void* createInferBuilder_INTERNAL(void*, int) { return nullptr; }
void* createInferRuntime_INTERNAL(void*, int) { return nullptr; }
void* createInferRefitter_INTERNAL(void*, void*, int) { return nullptr; }
void* createNvOnnxParser_INTERNAL(void*, void*, int) { return nullptr; }
void* createNvOnnxParserRefitter_INTERNAL(void*, void*, int) { return nullptr; }
void* getBuilderPluginRegistry(int) { return nullptr; }
void* getPluginRegistry() { return nullptr; }
int getNvOnnxParserVersion() { return 0; }
bool initLibNvInferPlugins(void*, const char*) { return true; }
}
